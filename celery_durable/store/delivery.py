"""Statements about admitted operations on their way to Celery.

An admitted row with ``sends`` 0 was never sent; with more, it was sent (or is about to be) and has not started yet.
Its ``due_at`` is when to send it (again). Celery queues are looked at one by one, so that the backlog of a full one
hides no other. None of the statements waits for a row that others hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    ScalarSelect,
    Select,
    Update,
    bindparam,
    func,
    literal,
    literal_column,
    select,
    update,
)

from celery_durable.store.admission import Admitted
from celery_durable.store.clock import now_ms
from celery_durable.store.schema import ADMITTED, SCHEDULED, Tables
from celery_durable.store.sending import Resends, sent, unsent
from celery_durable.store.sql import Dialect, among, database_now, execute_many, in_states, not_waiting_for_disk


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """One Celery queue. ``…_s``: seconds until a row is due; negative, one is overdue; inf, there is none."""

    queue: str
    new_due_s: float
    again_due_s: float
    front_ms: int | None
    """When (Unix ms) the first of those is due that were sent and have not started; None: there is none."""


@dataclass(frozen=True, slots=True)
class GivenBack:
    """An operation that nobody started: it waits again, without a permit."""

    id: str
    task: str
    queue: str
    account: str | None
    sends: int
    wait_ms: int


@dataclass(frozen=True, slots=True)
class Outbound:
    """One attempt and the message that starts it."""

    admitted: Admitted
    body: bytes
    content_type: str
    content_encoding: str
    headers: dict[str, Any]
    properties: dict[str, Any]
    publish: dict[str, Any]


class Deliveries:
    """The statements, built once per process."""

    def __init__(self, tables: Tables, dialect: Dialect, resends: Resends) -> None:
        self._queues = _queues(tables, dialect)
        self._sent = _sent(tables)
        self._claim_new = _claim(tables, dialect, resends, new=True)
        self._claim_again = _claim(tables, dialect, resends, new=False)
        self._give_back = _give_back(tables, resends)
        self._put_back = _put_back(tables)
        self._load = _load(tables, dialect)

    def queues(self, connection: Connection) -> list[QueueLoad]:
        """Every Celery queue with admitted operations."""
        rows = connection.execute(self._queues)
        return [
            QueueLoad(
                row.queue, _seconds(row.new_ms), _seconds(None if row.front is None else row.front - row.now), row.front
            )
            for row in rows
        ]

    def sent(self, connection: Connection, queue: str, count_max: int) -> int:
        """How many operations were sent to the queue and have not started, counted up to ``count_max``."""
        return int(connection.execute(self._sent, {"queue_name": queue, "count_max": count_max}).scalar_one())

    def give_back(self, connection: Connection, queue: str, limit: int, until_ms: int) -> list[GivenBack]:
        """Takes the permit from operations of the queue whose round of sends is over: they are ``scheduled`` again.

        :param until_ms: of those that are due until then (Unix ms).
        """
        rows = connection.execute(self._give_back, {"queue_name": queue, "limit": limit, "until": until_ms})
        return [GivenBack(row.id, row.task, row.queue, row.account, row.sends - 1, int(row.wait_ms)) for row in rows]

    def claim_new(self, connection: Connection, queue: str, limit: int) -> list[Admitted]:
        """Takes due operations of the queue that were never sent, and says when to send them again."""
        return _taken(connection.execute(self._claim_new, {"queue_name": queue, "limit": limit}))

    def claim_again(self, connection: Connection, queue: str, limit: int, until_ms: int) -> list[Admitted]:
        """Takes operations of the queue that were sent, did not start and are due again. First :meth:`give_back`.

        :param until_ms: those that are due until then (Unix ms).
        """
        return _taken(connection.execute(self._claim_again, {"queue_name": queue, "limit": limit, "until": until_ms}))

    def put_back(self, connection: Connection, unsent: Sequence[Admitted]) -> None:
        """Makes operations that were not sent after all due at once, as if they had not been taken.

        One that others hold stays as it is, and is due again when its time comes.
        """
        execute_many(
            connection,
            self._put_back,
            [
                {"number": one.order_no, "of_attempt": one.attempt, "of_generation": one.generation}
                for one in sorted(unsent, key=lambda one: one.order_no)
            ],
        )

    def load(self, connection: Connection, taken: Sequence[Admitted]) -> list[Outbound]:
        """The messages of those that still are to be sent, in the given order."""
        numbers = [one.order_no for one in taken]
        rows = {row.order_no: row for row in connection.execute(self._load, {"numbers": numbers})}
        return [
            Outbound(
                one,
                row.body,
                row.content_type,
                row.content_encoding,
                row.headers or {},
                row.properties or {},
                row.publish or {},
            )
            for one in taken
            if (row := rows.get(one.order_no)) is not None
            and (row.attempt, row.generation) == (one.attempt, one.generation)
        ]


def _seconds(left_ms: int | None) -> float:
    return float("inf") if left_ms is None else left_ms / 1000


def _taken(rows: Any) -> list[Admitted]:
    taken = [Admitted(row.order_no, row.id, row.generation, row.attempt, row.queue) for row in rows]
    return sorted(taken, key=lambda one: one.order_no)


def _first(column: ColumnElement[Any], *conditions: ColumnElement[bool]) -> ScalarSelect[Any]:
    """The smallest value. As ``min()``, PostgreSQL would read all entries of an index that it believes to be short."""
    return select(column).where(*conditions).order_by(column).limit(literal_column("1")).scalar_subquery()


def _queues(tables: Tables, dialect: Dialect) -> Select[Any]:
    """A loose index scan over (queue, due_at) of both kinds: one step a queue, whatever waits in it."""
    operations = tables.operations

    def first_queue(*conditions: Callable[[Any], ColumnElement[bool]]) -> ColumnElement[str]:
        firsts = []
        for kind in (unsent, sent):
            table = operations.alias(f"{kind.__name__}_one")
            firsts.append(_first(table.c.queue, kind(table), *(condition(table) for condition in conditions)))
        # SQLite's is NULL if one of them is.
        return func.least(*firsts) if dialect == "postgresql" else func.coalesce(func.min(*firsts), *firsts)

    walk = select(first_queue().label("queue")).cte("walk", recursive=True)
    following = first_queue(lambda table: table.c.queue > walk.c.queue)
    walk = walk.union_all(select(following).where(walk.c.queue.is_not(None)))

    def first_due(kind: Callable[[Any], ColumnElement[bool]]) -> ScalarSelect[Any]:
        table = operations.alias(f"{kind.__name__}_due")
        return _first(table.c.due_at, table.c.queue == walk.c.queue, kind(table))

    return select(
        walk.c.queue,
        (first_due(unsent) - database_now()).label("new_ms"),
        first_due(sent).label("front"),
        database_now().label("now"),
    ).where(walk.c.queue.is_not(None))


def _sent(tables: Tables) -> Select[Any]:
    operations = tables.operations
    under_way = (
        select(literal(1).label("one"))
        .where(operations.c.queue == bindparam("queue_name"), sent(operations))
        # The order costs nothing in the index, and keeps the planner from a scan that would first pass all that ended.
        .order_by(operations.c.due_at)
        .limit(bindparam("count_max"))
        .subquery()
    )
    return select(func.count()).select_from(under_way)


def _due(tables: Tables, *conditions: Any) -> Any:
    operations = tables.operations
    return (
        select(operations.c.order_no)
        .where(
            operations.c.queue == bindparam("queue_name"),
            operations.c.due_at <= database_now(),
            *conditions,
        )
        .order_by(operations.c.due_at)
        .limit(bindparam("limit"))
        .with_for_update(skip_locked=True)
        .cte("due")
    )


def _until(tables: Tables) -> ColumnElement[bool]:
    return tables.operations.c.due_at <= bindparam("until", type_=BigInteger)


def _claim(tables: Tables, dialect: Dialect, resends: Resends, *, new: bool) -> Any:
    operations = tables.operations
    sends = operations.c.sends
    due = (
        _due(tables, unsent(operations))
        if new
        else _due(tables, sent(operations), _until(tables), ~resends.round_over(sends))
    )
    return (
        update(operations)
        .where(operations.c.order_no.in_(select(due.c.order_no)))
        .values(due_at=now_ms() + resends.delay_ms(sends), sends=sends + 1)
        .returning(
            operations.c.order_no,
            operations.c.id,
            operations.c.generation,
            operations.c.attempt,
            operations.c.queue,
            # Forgotten, it is due still, and a second message of it is dropped (rule 8).
            *not_waiting_for_disk(dialect),
        )
    )


def _give_back(tables: Tables, resends: Resends) -> Any:
    operations = tables.operations
    due = _due(tables, sent(operations), _until(tables), resends.round_over(operations.c.sends))
    wait_ms = resends.give_back_ms(operations.c.sends)
    return (
        update(operations)
        .where(operations.c.order_no.in_(select(due.c.order_no)))
        .values(state=SCHEDULED, admitted_at=None, due_at=now_ms() + wait_ms, sends=operations.c.sends + 1)
        .returning(
            operations.c.id,
            operations.c.task,
            operations.c.queue,
            operations.c.account,
            operations.c.sends,
            (operations.c.due_at - now_ms()).label("wait_ms"),
        )
    )


def _put_back(tables: Tables) -> Update:
    operations = tables.operations
    unsent = (
        select(operations.c.order_no)
        .where(
            operations.c.order_no == bindparam("number"),
            operations.c.attempt == bindparam("of_attempt"),
            operations.c.generation == bindparam("of_generation"),
            in_states(operations, (ADMITTED,)),
            operations.c.sends > 0,
        )
        .with_for_update(skip_locked=True)
        .cte("unsent")
    )
    return (
        update(operations)
        .where(operations.c.order_no.in_(select(unsent.c.order_no)))
        .values(due_at=now_ms(), sends=operations.c.sends - 1)
    )


def _load(tables: Tables, dialect: Dialect) -> Select[Any]:
    operations, payloads = tables.operations, tables.payloads
    return (
        select(
            operations.c.order_no,
            operations.c.attempt,
            operations.c.generation,
            payloads.c.body,
            payloads.c.content_type,
            payloads.c.content_encoding,
            payloads.c.headers,
            payloads.c.properties,
            payloads.c.publish,
        )
        .join(payloads, payloads.c.id == operations.c.id)
        .where(among(operations.c.order_no, "numbers", dialect), in_states(operations, (ADMITTED,)))
    )
