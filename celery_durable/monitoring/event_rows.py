"""What the dispatcher's events are made from: the rows of operations that are new, known, or have just ended."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Connection, Integer, Select, and_, bindparam, exists, func, null, or_, select

from celery_durable.store.clock import now_ms
from celery_durable.store.recovery import keep_classes
from celery_durable.store.schema import ENDED_STATES, FAILED, LOST, RUNNING, Tables
from celery_durable.store.sql import database_now, in_states, parts

END_LAG_MS = 500
"""An end is read so long after it, when those that ended before it are committed too. What a longer transaction
cancels is found among the known."""

Position = tuple[int, int]
"""Where reading goes on in one class of retention: ``ended_at`` and ``order_no`` of the last end read."""


class EventRows:
    """Reads; each statement takes its rows from an index, and at most ``limit`` of them."""

    def __init__(self, tables: Tables) -> None:
        self._operations = tables.operations
        self._payloads = tables.payloads
        self._columns = _columns(tables)
        self._now = select(now_ms())
        self._newest = select(func.max(tables.operations.c.order_no))
        column = tables.operations.c.order_no
        after = self._with_headers().where(column > bindparam("order_no", type_=column.type))
        self._after = after.order_by(column).limit(bindparam("at_most", type_=Integer()))
        self._keep_classes = keep_classes(tables)
        self._busy = select(tables.operations.c.worker).where(
            in_states(tables.operations, (RUNNING,)), tables.operations.c.alive_until > database_now()
        )

    def now(self, connection: Connection) -> int:
        """The database's time."""
        return int(connection.execute(self._now).scalar_one())

    def newest(self, connection: Connection) -> int:
        """The highest order number; 0: there is no operation."""
        return int(connection.execute(self._newest).scalar_one() or 0)

    def after(self, connection: Connection, order_no: int, limit: int) -> list[Any]:
        """Operations in the order they were enqueued, with the headers of their messages."""
        return list(connection.execute(self._after, {"order_no": order_no, "at_most": limit}))

    def known(self, connection: Connection, numbers: Sequence[int]) -> list[Any]:
        """These operations, as far as they are there, with the headers of their messages."""
        column = self._operations.c.order_no
        return list(connection.execute(self._with_headers().where(column.in_(numbers)))) if numbers else []

    def ended(self, connection: Connection, positions: dict[int | None, Position], since: int, limit: int) -> list[Any]:
        """Operations that ended after ``positions``, which move on, and after the time ``since``.

        The index of ended operations begins with the retention, so they are read class by class.
        """
        found: list[Any] = []
        for keep_ms in (None, *connection.scalars(self._keep_classes)):
            position = max(positions.get(keep_ms, (since, 0)), (since, 0))
            rows = connection.execute(self._ended(keep_ms, position, limit)).all()
            positions[keep_ms] = (rows[-1].ended_at, rows[-1].order_no) if rows else position
            found += rows
        return found

    def any_busy(self, connection: Connection) -> str | None:
        """A worker with an attempt that is alive."""
        newest = self._busy.order_by(self._operations.c.alive_until.desc()).limit(1)
        return connection.scalars(newest).first() or None

    def busy(self, connection: Connection, workers: Collection[str]) -> set[str]:
        """Those of the workers with an attempt that is alive."""
        found: set[str] = set()
        for some in parts(sorted(workers)):
            found.update(connection.scalars(self._busy.where(self._operations.c.worker.in_(some)).distinct()))
        return found

    def _with_headers(self) -> Select[Any]:
        operations, payloads = self._operations, self._payloads
        return select(*self._columns, payloads.c.headers).join_from(
            operations, payloads, operations.c.id == payloads.c.id
        )

    def _ended(self, keep_ms: int | None, position: Position, limit: int) -> Select[Any]:
        operations = self._operations
        at, number = position
        keep = operations.c.retention_ms
        after = or_(operations.c.ended_at > at, and_(operations.c.ended_at == at, operations.c.order_no > number))
        return (
            select(*self._columns, null().label("headers"))
            .where(
                keep.is_(None) if keep_ms is None else keep == keep_ms,
                in_states(operations, ENDED_STATES),
                operations.c.ended_at >= at,
                operations.c.ended_at <= database_now() - END_LAG_MS,
                after,
            )
            .order_by(operations.c.ended_at, operations.c.order_no)
            .limit(limit)
        )


def _columns(tables: Tables) -> list[Any]:
    operations, attempts = tables.operations, tables.attempts
    lost = and_(
        operations.c.state == FAILED,
        exists().where(
            attempts.c.operation_id == operations.c.id,
            attempts.c.run_token == operations.c.run_token,
            attempts.c.outcome == LOST,
        ),
    )
    names = (
        "order_no", "id", "task", "account", "group", "queue", "state", "retries", "worker", "worker_losses",
        "started_at", "expires_at", "ended_at", "error", "traceback",
    )  # fmt: skip
    return [*(operations.c[name] for name in names), lost.label("lost")]
