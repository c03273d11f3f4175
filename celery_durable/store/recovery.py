"""Statements that move operations on when a time has come: due, expired and kept long enough.

Every time is compared with the database's clock, so a host's wrong one shifts nothing (case C17). Rows that others
hold are left for the next look. Whatever gives a permit back, or begins to wait for one, returns its account: the
caller wakes it in the same transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    BindParameter,
    Connection,
    Select,
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    or_,
    select,
    update,
)

from celery_durable.permits.messages import Declared
from celery_durable.store.clock import now_ms
from celery_durable.store.schema import (
    ADMITTED,
    CANCELLED,
    ENDED_STATES,
    QUEUED,
    RETRYING,
    RUNNING,
    SCHEDULED,
    WAITING_STATES,
    Tables,
)
from celery_durable.store.sql import database_now, in_states, parts


@dataclass(frozen=True, slots=True)
class Moved:
    """An operation whose state has changed, and what its task declares for the account.

    An account keeps no row while its operations only wait for their time, so one that is queued declares anew.
    """

    id: str
    account: str | None
    state: str
    declared: Declared = field(default_factory=Declared)


class Recoveries:
    """The statements, built once per process. They work inside the caller's transaction."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._next = _next_due(tables)
        self._promote = _promote(tables)
        self._expire = _expire(tables)
        self._keep_classes = keep_classes(tables)
        self._ended_default = _ended(tables, own=False)
        self._ended_own = _ended(tables, own=True)

    def seconds_until_due(self, connection: Connection) -> float:
        """Until the next heartbeat, due time or expiry passes: 0 or less if one has, inf if none is known."""
        left_ms = connection.execute(self._next).scalar_one()
        return float("inf") if left_ms is None else float(left_ms) / 1000

    def expire(self, connection: Connection, limit: int) -> list[Moved]:
        """Cancels operations that expired before an attempt started (case D5)."""
        return [Moved(row.id, row.account, row.state) for row in connection.execute(self._expire, {"limit": limit})]

    def promote(self, connection: Connection, limit: int) -> list[Moved]:
        """Moves on what is due: ``retrying`` to ``admitted``, ``scheduled`` to ``queued``.

        Without an account ``scheduled`` becomes ``admitted``. What was asked to be cancelled meanwhile is
        ``cancelled`` instead. An admitted row is due for delivery at once; a queued one is back in its old place.
        """
        rows = connection.execute(self._promote, {"limit": limit}).all()
        declared = self._declared(connection, [row.id for row in rows if row.state == QUEUED])
        return [Moved(row.id, row.account, row.state, declared.get(row.id, Declared())) for row in rows]

    def _declared(self, connection: Connection, ids: Sequence[str]) -> dict[str, Declared]:
        payloads = self._tables.payloads
        found: dict[str, Declared] = {}
        for some in parts(ids):
            statement = select(payloads.c.id, payloads.c.policy).where(payloads.c.id.in_(some))
            found.update((row.id, _declared(row.policy or {})) for row in connection.execute(statement))
        return found

    def delete_ended(self, connection: Connection, limit: int, default_ms: int) -> int:
        """Deletes operations that were kept long enough after they ended, with payload and history.

        :param limit: rows at most, of each retention.
        :param default_ms: retention of operations without one of their own.
        """
        found = list(connection.execute(self._ended_default, {"keep_ms": default_ms, "limit": limit}))
        for keep_ms in connection.scalars(self._keep_classes).all():
            found += connection.execute(self._ended_own, {"keep_ms": keep_ms, "limit": limit})
        _delete(connection, self._tables, found)
        return len(found)


def purge(connection: Connection, tables: Tables, before_ms: int, limit: int) -> Counter[str]:
    """Deletes operations that ended before a time, however long they were to be kept. Returns how many, by state.

    :param before_ms: by the database's clock.
    :param limit: rows at most.
    """
    found: list[Any] = []
    for keep_ms in (None, *connection.scalars(keep_classes(tables)).all()):  # the index begins with the retention
        wanted = {"keep_ms": keep_ms, "at_ms": before_ms - 1, "limit": limit - len(found)}
        found += connection.execute(_ended_at(tables, own=keep_ms is not None), wanted)
    _delete(connection, tables, found)
    return Counter(row.state for row in found)


def _delete(connection: Connection, tables: Tables, found: Sequence[Any]) -> None:
    operations, payloads, attempts = tables.operations, tables.payloads, tables.attempts
    for part in parts(found):
        ids = [row.id for row in part]
        connection.execute(delete(payloads).where(payloads.c.id.in_(ids)))
        connection.execute(delete(attempts).where(attempts.c.operation_id.in_(ids)))
        connection.execute(delete(operations).where(operations.c.order_no.in_([row.order_no for row in part])))


def _declared(policy: Mapping[str, Any]) -> Declared:
    return Declared(
        limit=policy.get("limit"), group_limit=policy.get("group_limit"), mutex=bool(policy.get("mutex", False))
    )


def _next_due(tables: Tables) -> Select[Any]:
    operations = tables.operations

    def first(column: Any, *states: str) -> Any:
        return select(func.min(column).label("at")).where(column.is_not(None), in_states(operations, states))

    times = (
        first(operations.c.due_at, SCHEDULED, RETRYING)
        .union_all(
            first(operations.c.alive_until, RUNNING),
            first(operations.c.expires_at, *WAITING_STATES, ADMITTED, RETRYING),
        )
        .subquery()
    )
    return select(func.min(times.c.at) - database_now())


def _due(tables: Tables, states: Sequence[str], column: str, *conditions: Any) -> Any:
    operations = tables.operations
    at = operations.c[column]
    return (
        select(operations.c.order_no)
        .where(in_states(operations, states), at.is_not(None), at <= database_now(), *conditions)
        .order_by(at)
        .limit(bindparam("limit"))
        .with_for_update(skip_locked=True)
        .cte("due")
    )


def _promote(tables: Tables) -> Any:
    operations = tables.operations
    due = _due(tables, (SCHEDULED, RETRYING), "due_at")
    cancelled = operations.c.cancel_requested_at.is_not(None)
    queued = and_(operations.c.state == SCHEDULED, operations.c.account.is_not(None))
    stays = or_(cancelled, queued)
    return (
        update(operations)
        .where(operations.c.order_no.in_(select(due.c.order_no)))
        .values(
            state=case((cancelled, CANCELLED), (queued, QUEUED), else_=ADMITTED),
            due_at=case((stays, None), else_=now_ms()),
            admitted_at=case((stays, operations.c.admitted_at), else_=now_ms()),
            ended_at=case((cancelled, now_ms()), else_=None),
        )
        .returning(operations.c.id, operations.c.account, operations.c.state)
    )


def _expire(tables: Tables) -> Any:
    operations = tables.operations
    due = _due(tables, (*WAITING_STATES, ADMITTED, RETRYING), "expires_at")
    return (
        update(operations)
        .where(operations.c.order_no.in_(select(due.c.order_no)))
        .values(state=CANCELLED, due_at=None, ended_at=now_ms(), error="expired before an attempt started")
        .returning(operations.c.id, operations.c.account, operations.c.state)
    )


def keep_classes(tables: Tables) -> Select[Any]:
    """The retentions that ended operations have of their own: a loose index scan, since they are few."""
    operations = tables.operations
    first, following = operations.alias("first"), operations.alias("following")
    walk = (
        select(func.min(first.c.retention_ms).label("keep_ms"))
        .where(first.c.retention_ms.is_not(None), in_states(first, ENDED_STATES))
        .cte("walk", recursive=True)
    )
    following_one = (
        select(func.min(following.c.retention_ms))
        .where(following.c.retention_ms > walk.c.keep_ms, in_states(following, ENDED_STATES))
        .scalar_subquery()
    )
    walk = walk.union_all(select(following_one).where(walk.c.keep_ms.is_not(None)))
    return select(walk.c.keep_ms).where(walk.c.keep_ms.is_not(None))


_KEEP_MS: BindParameter[int] = bindparam("keep_ms", type_=BigInteger)


def _ended(tables: Tables, *, own: bool) -> Select[Any]:
    return _ended_by(tables, database_now() - _KEEP_MS, own=own)


@lru_cache(maxsize=64)
def _ended_at(tables: Tables, *, own: bool) -> Select[Any]:
    return _ended_by(tables, bindparam("at_ms", type_=BigInteger), own=own)


def _ended_by(tables: Tables, at_ms: Any, *, own: bool) -> Select[Any]:
    """Ended at ``at_ms`` or before, with a retention of their own or without; what is still to be told stays."""
    operations, untold = tables.operations, tables.untold
    return (
        select(operations.c.order_no, operations.c.id, operations.c.state)
        .where(
            operations.c.retention_ms == _KEEP_MS if own else operations.c.retention_ms.is_(None),
            in_states(operations, ENDED_STATES),
            operations.c.ended_at <= at_ms,
            ~exists().where(untold.c.operation_id == operations.c.id),
        )
        .order_by(operations.c.ended_at)
        .limit(bindparam("limit"))
        .with_for_update(skip_locked=True)
    )
