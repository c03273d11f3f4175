"""Operations that have ended, and whose end the app's own result backend, or an errback, may not have been told.

The write that ends an operation leaves the mark; who has told deletes it. What stays, since a process died in between
or the result backend was away, a dispatcher tells when it is due (case C23).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, bindparam, case, delete, func, literal, select, tuple_, update

from celery_durable.store.clock import now_ms
from celery_durable.store.schema import ENDED_STATES, Tables
from celery_durable.store.sql import PARAMETERS_MAX, database_now, dialect_insert, dialect_of, in_states, parts

GRACE_MS = 5_000
"""How long whoever ended an operation has to tell it, before a dispatcher does."""
_PAUSE_MAX_MS = 300_000
TRIES_MAX = 320
"""A day and some hours of them: Redis keeps no result longer than a day by default, so nobody waits for it any more."""
BYTES_MAX = 4_000_000
"""Bodies in memory at once, but for one that is larger."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Which end of which operation."""

    operation_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class Ended:
    """An operation that has ended, with the message that it was sent as."""

    mark: Mark
    task: str
    body: bytes
    content_type: str
    content_encoding: str
    headers: Mapping[str, Any]
    properties: Mapping[str, Any]


class Untold:
    """The statements, built once per process. They work inside the caller's transaction."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._next = _next(tables)
        self._claim = _claim(tables)

    def mark(self, connection: Connection, ids: Sequence[str], *, grace_ms: int = 0) -> None:
        """Marks those of the operations that have ended. The transaction that ended them holds their rows."""
        untold, operations = self._tables.untold, self._tables.operations
        for some in parts(ids):
            ended = select(
                operations.c.id, operations.c.generation, now_ms() + grace_ms, literal(0, untold.c.tries.type)
            ).where(operations.c.id.in_(some), in_states(operations, ENDED_STATES))
            statement = dialect_insert(dialect_of(connection), untold).from_select(
                ["operation_id", "generation", "due_at", "tries"], ended
            )
            new = {name: statement.excluded[name] for name in ("generation", "due_at", "tries")}
            connection.execute(statement.on_conflict_do_update(index_elements=["operation_id"], set_=new))

    def seconds_until_due(self, connection: Connection) -> float:
        """Until the next mark is due: 0 or less if one is, inf if there is none."""
        left_ms = connection.execute(self._next).scalar_one()
        return float("inf") if left_ms is None else float(left_ms) / 1000

    def give_up(self, connection: Connection) -> list[Mark]:
        """Deletes the due marks that were claimed :data:`TRIES_MAX` times, and returns them."""
        untold = self._tables.untold
        statement = delete(untold).where(untold.c.due_at <= database_now(), untold.c.tries >= TRIES_MAX)
        rows = connection.execute(statement.returning(untold.c.operation_id, untold.c.generation))
        return [Mark(row.operation_id, row.generation) for row in rows]

    def claim(self, connection: Connection, limit: int) -> list[Mark]:
        """Takes due marks, and says when to tell them again: later each time."""
        rows = connection.execute(self._claim, {"limit": limit})
        return [Mark(row.operation_id, row.generation) for row in rows]

    def batches(self, connection: Connection, marks: Iterable[Mark]) -> list[list[Mark]]:
        """The marks in parts whose bodies fit into memory together. Those of deleted operations are left out."""
        payloads = self._tables.payloads
        wanted = {mark.operation_id: mark for mark in marks}
        found: list[list[Mark]] = []
        room = 0
        for some in parts(list(wanted)):
            sizes = select(payloads.c.id, func.length(payloads.c.body)).where(payloads.c.id.in_(some))
            for operation_id, size in connection.execute(sizes):
                if not found or size > room:
                    found.append([])
                    room = BYTES_MAX
                found[-1].append(wanted[operation_id])
                room -= size
        return found

    def load(self, connection: Connection, marks: Iterable[Mark]) -> list[Ended]:
        """What was marked and still is as it was: not deleted, nor run again by hand."""
        operations, payloads = self._tables.operations, self._tables.payloads
        wanted = {mark.operation_id: mark for mark in marks}
        found = []
        for some in parts(list(wanted)):
            statement = (
                select(
                    operations.c.id,
                    operations.c.generation,
                    operations.c.task,
                    payloads.c.body,
                    payloads.c.content_type,
                    payloads.c.content_encoding,
                    payloads.c.headers,
                    payloads.c.properties,
                )
                .join(payloads, payloads.c.id == operations.c.id)
                .where(operations.c.id.in_(some), in_states(operations, ENDED_STATES))
            )
            for row in connection.execute(statement):
                mark = wanted[row.id]
                if row.generation == mark.generation:
                    found.append(Ended(mark, row.task, *row[3:6], row.headers or {}, row.properties or {}))
        return found

    def told(self, connection: Connection, marks: Iterable[Mark]) -> None:
        """Deletes the marks, but for one that a later end of the same operation has left."""
        untold = self._tables.untold
        key = tuple_(untold.c.operation_id, untold.c.generation)
        for some in parts([(mark.operation_id, mark.generation) for mark in marks], PARAMETERS_MAX // 2):
            connection.execute(delete(untold).where(key.in_(some)))


@lru_cache(maxsize=64)
def _next(tables: Tables) -> Any:
    return select(func.min(tables.untold.c.due_at) - database_now())


@lru_cache(maxsize=64)
def _claim(tables: Tables) -> Any:
    untold = tables.untold
    due = (
        select(untold.c.operation_id)
        .where(untold.c.due_at <= database_now())
        .order_by(untold.c.due_at)
        .limit(bindparam("limit"))
        .with_for_update(skip_locked=True)
        .cte("due")
    )
    tries = untold.c.tries
    pause_ms = case((tries < _PAUSE_MAX_MS // GRACE_MS, GRACE_MS * (tries + 1)), else_=_PAUSE_MAX_MS)
    return (
        update(untold)
        .where(untold.c.operation_id.in_(select(due.c.operation_id)))
        .values(due_at=now_ms() + pause_ms, tries=tries + 1)
        .returning(untold.c.operation_id, untold.c.generation)
    )
