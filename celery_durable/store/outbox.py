"""The transactional outbox of a client or a holder: rows that the relay sends to Kafka and then deletes.

A row with a ``slot`` replaces the unsent one of the same (topic, key, slot): a newer report supersedes an older one
(rule 5). Rows are selected by being there, never by a cursor over their numbers, since commit order is not number
order (case B12). The relay holds no lock while it sends; it deletes a row only at the version that it sent (case B3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    any_,
    bindparam,
    delete,
    func,
    select,
    tuple_,
    update,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.sql.elements import Grouping

from celery_durable.store.arrays import from_rows, parameters
from celery_durable.store.clock import NOW_MS_SQL, now_ms
from celery_durable.store.prepared import PSYCOPG
from celery_durable.store.sql import (
    Dialect,
    database_now,
    dialect_insert,
    dialect_of,
    is_psycopg,
    not_waiting_for_disk,
    parts,
)

ROWS_A_STATEMENT = 500
"""Rows that one statement writes, or names by number, at most: far below every database's limit of parameters."""


def outbox_table(metadata: MetaData, prefix: str) -> Table:
    """The outbox under ``prefix``."""
    return Table(
        f"{prefix}outbox",
        metadata,
        Column("no", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
        Column("topic", String(255), nullable=False),
        Column("key", Text, nullable=False),
        Column("slot", Text, comment="null: never replaced"),
        Column("body", LargeBinary, nullable=False),
        Column("headers", JSON),
        Column(
            "version",
            BigInteger,
            nullable=False,
            server_default="1",
            comment="raised when the row is replaced",
        ),
        Column("failures", Integer, nullable=False, server_default="0"),
        Column("due_at", BigInteger, nullable=False, comment="Unix ms: when to send it (again)"),
        Column("staged_at", BigInteger, nullable=False),
        UniqueConstraint("topic", "key", "slot", name=f"{prefix}outbox_slot"),
        Index(f"{prefix}outbox_due", "due_at"),
        comment="Messages to Kafka, written in the transaction that they report",
        # A row's number must never be given again: a relay deletes by (no, version), and SQLite would reuse it.
        sqlite_autoincrement=True,
    )


@dataclass(frozen=True, slots=True)
class Staged:
    """A message to stage. ``slot`` None: it replaces nothing."""

    topic: str
    key: str
    body: bytes
    slot: str | None = None
    headers: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A row that is due, as the relay claimed it."""

    no: int
    version: int
    topic: str
    key: str
    body: bytes
    headers: dict[str, str] | None
    failures: int


def stage(connection: Connection, outbox: Table, messages: Sequence[Staged]) -> None:
    """Writes the messages in the caller's transaction; a rollback sends nothing (case B1).

    A message with a slot replaces the unsent one there: its version rises, it is due now, its failures are forgotten.
    """
    if not messages:
        return
    slots: dict[tuple[str, str, str], Staged] = {}
    plain: list[Staged] = []
    for message in messages:
        if message.slot is None:
            plain.append(message)
        else:
            slots[message.topic, message.key, message.slot] = message
    # All writers lock the rows that they replace in one order, so that no two of them can deadlock.
    ordered = [*plain, *(slots[name] for name in sorted(slots))]
    rows = [{"topic": m.topic, "key": m.key, "slot": m.slot, "body": m.body, "headers": m.headers} for m in ordered]
    if is_psycopg(connection):
        for some in parts(rows, ROWS_A_STATEMENT):
            connection.exec_driver_sql(_stage_many(outbox), parameters(_STAGED, some))
    else:
        connection.execute(_stage(outbox, dialect_of(connection)), rows)


_STAGED = {"topic": "text", "key": "text", "slot": "text", "body": "bytea", "headers": "json"}


@lru_cache(maxsize=64)
def _stage_many(outbox: Table) -> str:
    now = NOW_MS_SQL["postgresql"]
    table = PSYCOPG.identifier_preparer.format_table(outbox)
    return f"""
        INSERT INTO {table} AS present (topic, key, slot, body, headers, due_at, staged_at)
        SELECT topic, key, slot, body, headers, {now}, {now} FROM {from_rows(_STAGED)}
        ON CONFLICT (topic, key, slot) DO UPDATE SET body = excluded.body, headers = excluded.headers,
            version = present.version + 1, failures = 0, due_at = {now}
        """


@lru_cache(maxsize=64)
def _stage(outbox: Table, dialect: Dialect) -> Any:
    statement = dialect_insert(dialect, outbox).values(
        {
            "topic": bindparam("topic"),
            "key": bindparam("key"),
            "slot": bindparam("slot"),
            "body": bindparam("body"),
            "headers": bindparam("headers"),
            "due_at": now_ms(),
            "staged_at": now_ms(),
        }
    )
    return statement.on_conflict_do_update(
        index_elements=["topic", "key", "slot"],
        set_={
            "body": statement.excluded.body,
            "headers": statement.excluded.headers,
            "version": outbox.c.version + 1,
            "failures": 0,
            "due_at": now_ms(),
        },
    )


def claim(connection: Connection, outbox: Table, *, limit: int, hold_ms: int) -> list[Outgoing]:
    """Takes due rows for ``hold_ms``: until then no other relay sends them. Skips rows that are locked."""
    statement = _claim(outbox, dialect_of(connection))
    found = connection.execute(statement, {"limit": limit, "hold_ms": hold_ms})
    return sorted((Outgoing(*row[: len(_OUTGOING)]) for row in found), key=lambda row: row.no)


@lru_cache(maxsize=64)
def _claim(outbox: Table, dialect: Dialect) -> Any:
    due = (
        select(outbox.c.no)
        .where(outbox.c.due_at <= database_now())
        .order_by(outbox.c.due_at, outbox.c.no)
        .limit(bindparam("limit"))
        .with_for_update(skip_locked=True)
        .cte("due")
    )
    return (
        update(outbox)
        .where(outbox.c.no.in_(select(due.c.no)))
        .values(due_at=now_ms() + bindparam("hold_ms", type_=BigInteger))
        # Forgotten by a crash of the server, the row is due still, and sent twice.
        .returning(*(outbox.c[name] for name in _OUTGOING), *not_waiting_for_disk(dialect))
    )


def delivered(connection: Connection, outbox: Table, sent: Sequence[Outgoing]) -> int:
    """Deletes rows whose delivery report came, each only at the version that was sent. Returns how many.

    A row that is locked is being replaced, so it stays.
    """
    deleted = 0
    for some in parts(sent, ROWS_A_STATEMENT):
        found = connection.execute(_delivered(outbox, dialect_of(connection)), _versions(connection, some))
        deleted += len(found.all())
    return deleted


def failed(
    connection: Connection, outbox: Table, sent: Sequence[Outgoing], *, retry_min_ms: int, retry_max_ms: int
) -> None:
    """Makes rows due again later, backing off by their failures; holds back no other key (case B6).

    Only at the version that was sent: a row that was replaced meanwhile is due already.
    """
    for failures, rows in groupby(sorted(sent, key=lambda row: row.failures), key=lambda row: row.failures):
        delay_ms = min(retry_max_ms, retry_min_ms << min(failures, 30))
        for some in parts(list(rows), ROWS_A_STATEMENT):
            values = {**_versions(connection, some), "failed": failures + 1, "delay_ms": delay_ms}
            connection.execute(_failed(outbox, dialect_of(connection)), values)


def due_in_ms(connection: Connection, outbox: Table) -> int | None:
    """Ms until the first row is due, 0 or less if one is due now, None if the outbox is empty."""
    value = connection.execute(_due_in_ms(outbox)).scalar_one()
    return None if value is None else int(value)


@lru_cache(maxsize=64)
def _due_in_ms(outbox: Table) -> Any:
    return select(func.min(outbox.c.due_at) - database_now())


def depth(connection: Connection, outbox: Table) -> tuple[int, int]:
    """(rows waiting, age of the oldest in ms). A row's age counts from its first staging, replaced or not."""
    rows, age = connection.execute(
        select(func.count(), database_now() - func.min(outbox.c.staged_at)).select_from(outbox)
    ).one()
    return int(rows), 0 if age is None else max(0, int(age))


_OUTGOING = ("no", "version", "topic", "key", "body", "headers", "failures")


def _versions(connection: Connection, sent: Sequence[Outgoing]) -> dict[str, Any]:
    # A relay's connection, never a caller's: on PostgreSQL it is psycopg's.
    if dialect_of(connection) == "postgresql":
        # A row that was replaced while it was sent is there twice. Versions only rise: the older one matches nothing.
        newest = dict(sorted((row.no, row.version) for row in sent))
        return {"nos": list(newest), "versions": list(newest.values())}
    return {"sent": [(row.no, row.version) for row in sent]}


@lru_cache(maxsize=64)
def _delivered(outbox: Table, dialect: Dialect) -> Any:
    # Forgotten by a crash of the server, the row is there again, and sent again.
    return delete(outbox).where(_as_sent(outbox, dialect)).returning(outbox.c.no, *not_waiting_for_disk(dialect))


@lru_cache(maxsize=64)
def _failed(outbox: Table, dialect: Dialect) -> Any:
    due_at = now_ms() + bindparam("delay_ms", type_=BigInteger)
    return update(outbox).where(_as_sent(outbox, dialect)).values(failures=bindparam("failed"), due_at=due_at)


def _as_sent(outbox: Table, dialect: Dialect) -> ColumnElement[bool]:
    """The rows that still have the version that was sent. Skips locked rows, so that no relay waits for a pass."""
    if dialect == "sqlite":
        return tuple_(outbox.c.no, outbox.c.version).in_(bindparam("sent", expanding=True))
    # No joins, whose plan follows statistics: where an outbox that is full now was empty when it was analyzed, each row
    # was joined with each, and the deletion of 600 took 45 s, in which passes waited for its locks.
    bigints = postgresql.ARRAY(BigInteger)
    nos, versions = (bindparam(name, type_=bigints) for name in ("nos", "versions"))
    version = Grouping(versions)[func.array_position(nos, outbox.c.no)]
    rows = select(outbox.c.no).where(outbox.c.no == any_(nos), outbox.c.version == version).order_by(outbox.c.no)
    found = rows.with_for_update(skip_locked=True).cte("found")
    return outbox.c.no == any_(func.array(select(found.c.no).scalar_subquery()))
