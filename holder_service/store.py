"""The holder's tables and the statements on them, the same on SQLite and PostgreSQL (design, section 9).

Every write of an account is a compare-and-set on the version that was read, inserts and deletes included (rule 7): of
two holders that both believe they own a partition, only one commits. All times are Unix ms of the database's clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    bindparam,
    delete,
    func,
    select,
    text,
    update,
)

from celery_durable.permits.messages import LimitMirror, read_limit_mirror
from celery_durable.store.arrays import from_rows, parameters
from celery_durable.store.clock import now_ms
from celery_durable.store.counters import counter_table
from celery_durable.store.offsets import offsets_table
from celery_durable.store.outbox import outbox_table
from celery_durable.store.prepared import PSYCOPG
from celery_durable.store.sql import Dialect, dialect_insert, dialect_of, insert_new, parts
from holder_service.semaphore import AccountState

DEFAULT_PREFIX = "holder_"
VERSION_COUNTER = "version"
"""Its row is made by the first migration, with value 0."""


@dataclass(frozen=True)
class HolderTables:
    """The tables of one holder database, under its prefix and schema."""

    metadata: MetaData
    prefix: str
    accounts: Table
    database: Table
    limits: Table
    outbox: Table
    offsets: Table
    counters: Table


def build_tables(prefix: str = DEFAULT_PREFIX, schema: str | None = None) -> HolderTables:
    """The tables under ``prefix`` (and, on PostgreSQL, in ``schema``)."""
    metadata = MetaData(schema=schema)
    has_due = text("due_at IS NOT NULL")
    accounts = Table(
        f"{prefix}accounts",
        metadata,
        Column("account", Text, primary_key=True),
        Column("partition", Integer, nullable=False, comment="where its messages came from last: who runs its timers"),
        Column("epoch", BigInteger, nullable=False),
        Column("version", BigInteger, nullable=False, comment="every write is a compare-and-set on it"),
        Column("due_at", BigInteger, comment="when it needs a timer, without a message"),
        Column("state", Text, nullable=False, comment="semaphore.AccountState as JSON"),
        Index(f"{prefix}accounts_due", "partition", "due_at", postgresql_where=has_due, sqlite_where=has_due),
        comment="What each account's clients reported and were given; idle accounts have no row",
    )
    database = Table(
        f"{prefix}database",
        metadata,
        Column("only", Integer, primary_key=True, autoincrement=False, comment="1: there is one row"),
        Column(
            "epoch", BigInteger, nullable=False, comment="the life of this database: its birth, or its last rebuild"
        ),
        Column("born_at", BigInteger, nullable=False),
        Column("phase", String(16), nullable=False, comment="ready, rebuilding, topic_lost"),
        Column("rebuild", Text, comment="progress of the rebuild, as JSON"),
        Column("revision", BigInteger, nullable=False, comment="every write is a compare-and-set on it"),
        Column("changed_at", BigInteger, nullable=False),
        comment="Which life of the database this is",
    )
    limits = Table(
        f"{prefix}limits",
        metadata,
        Column("account", Text, primary_key=True),
        Column("mirror", Text, nullable=False, comment="permits.messages.LimitMirror as JSON"),
        comment="Commands in force; a row outlives its account's",
    )
    return HolderTables(
        metadata=metadata,
        prefix=prefix,
        accounts=accounts,
        database=database,
        limits=limits,
        outbox=outbox_table(metadata, prefix),
        offsets=offsets_table(metadata, prefix),
        counters=counter_table(metadata, prefix),
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One account as its row holds it. ``version`` is the row's, which compare-and-set looks at."""

    account: str
    partition: int
    version: int
    due_at_ms: int | None
    state: AccountState


@dataclass(frozen=True, slots=True)
class Write:
    """One account's write: from the row at ``old_version`` (None: there is none) to ``new`` (None: it goes)."""

    account: str
    old_version: int | None
    new: Row | None


def rewrite(row: Row, version: int, state: AccountState, *, due_at_ms: int) -> Write:
    """The write that gives ``row`` another ``state``, and has its holder look at it at ``due_at_ms``."""
    return Write(row.account, row.version, replace(row, version=version, due_at_ms=due_at_ms, state=state))


class VersionMoved(Exception):
    """Another holder wrote an account in between: roll back, reload what was read, and decide again."""


def clock_ms(connection: Connection) -> int:
    """The database's time now, Unix ms."""
    return int(connection.execute(select(now_ms())).scalar_one())


def load_rows(connection: Connection, tables: HolderTables, accounts: Collection[str]) -> dict[str, Row]:
    """The rows of those ``accounts`` that have one."""
    found: dict[str, Row] = {}
    columns = tables.accounts.c
    for some in parts(sorted(accounts)):
        for record in connection.execute(select(tables.accounts).where(columns.account.in_(some))):
            found[record.account] = Row(
                account=record.account,
                partition=record.partition,
                version=record.version,
                due_at_ms=record.due_at,
                state=AccountState.from_json(record.state),
            )
    return found


def all_rows(connection: Connection, tables: HolderTables, *, batch: int = 500) -> Iterator[list[Row]]:
    """All rows in the accounts' order, a batch at a time."""
    columns = tables.accounts.c
    last: str | None = None
    while True:
        query = select(columns.account).order_by(columns.account).limit(batch)
        if last is not None:
            query = query.where(columns.account > last)
        names = [str(name) for name in connection.execute(query).scalars()]
        if not names:
            return
        last = names[-1]
        yield list(load_rows(connection, tables, names).values())


def write_rows(connection: Connection, tables: HolderTables, writes: Sequence[Write]) -> None:
    """Writes every account at the version that was read. Raises :class:`VersionMoved` if any has another one now.

    The version counter's row is the caller's until it commits: no two holders write at once, nor wait in a ring.
    """
    inserts = [_values(write.new) for write in writes if write.new is not None and write.old_version is None]
    updates = [
        {**_values(write.new), "key": write.account, "old_version": write.old_version}
        for write in writes
        if write.new is not None and write.old_version is not None
    ]
    deletes = [
        {"key": write.account, "old_version": write.old_version}
        for write in writes
        if write.new is None and write.old_version is not None
    ]
    if updates:
        _expect(_write_updates(connection, tables.accounts, updates), len(updates))
    if deletes:
        _expect(connection.execute(_delete(tables.accounts), deletes).rowcount, len(deletes))
    if inserts:
        # Returning tells how many went in: drivers count no rows of an insert that SQLAlchemy sends in pages.
        insert = _insert(tables.accounts, dialect_of(connection))
        _expect(len(connection.execute(insert, inserts).all()), len(inserts))


def _write_updates(connection: Connection, accounts: Table, updates: Sequence[Mapping[str, Any]]) -> int:
    if dialect_of(connection) == "postgresql":
        return connection.exec_driver_sql(_update_many(accounts), parameters(_UPDATED, updates)).rowcount
    return connection.execute(_update(accounts), updates).rowcount


_UPDATED = {
    "key": "text",
    **dict.fromkeys(("old_version", "partition", "epoch", "version", "due_at"), "bigint"),
    "state": "text",
}


@lru_cache(maxsize=64)
def _update_many(accounts: Table) -> str:
    changed = ", ".join(f"{name} = new.{name}" for name in ("partition", "epoch", "version", "due_at", "state"))
    return f"""
        UPDATE {PSYCOPG.identifier_preparer.format_table(accounts)} AS present SET {changed}
        FROM {from_rows(_UPDATED)} WHERE present.account = new.key AND present.version = new.old_version
        """


def _at_version(accounts: Table) -> ColumnElement[bool]:
    return (accounts.c.account == bindparam("key")) & (accounts.c.version == bindparam("old_version"))


@lru_cache(maxsize=64)
def _update(accounts: Table) -> Any:
    changed: dict[str, Any] = {name: bindparam(name) for name in ("partition", "epoch", "version", "due_at", "state")}
    return update(accounts).where(_at_version(accounts)).values(changed)


@lru_cache(maxsize=64)
def _delete(accounts: Table) -> Any:
    return delete(accounts).where(_at_version(accounts))


@lru_cache(maxsize=64)
def _insert(accounts: Table, dialect: Dialect) -> Any:
    return insert_new(dialect, accounts).returning(accounts.c.account)


def load_mirrors(connection: Connection, tables: HolderTables, accounts: Collection[str]) -> dict[str, LimitMirror]:
    """The commands in force for those ``accounts`` that have any."""
    found: dict[str, LimitMirror] = {}
    for some in parts(sorted(accounts)):
        query = select(tables.limits).where(tables.limits.c.account.in_(some))
        for record in connection.execute(query):
            found[record.account] = read_limit_mirror(record.mirror.encode())
    return found


def write_mirrors(connection: Connection, tables: HolderTables, mirrors: Sequence[LimitMirror]) -> None:
    """Puts each account's commands in place of what was there; the account's own write fences it."""
    if not mirrors:
        return
    insert = dialect_insert(dialect_of(connection), tables.limits)
    upsert = insert.on_conflict_do_update(index_elements=["account"], set_={"mirror": insert.excluded.mirror})
    ordered = sorted(mirrors, key=lambda mirror: mirror.account)
    connection.execute(upsert, [{"account": m.account, "mirror": m.to_bytes().decode()} for m in ordered])


def due_accounts(
    connection: Connection, tables: HolderTables, partitions: Collection[int], now: int, *, limit: int
) -> list[tuple[str, int]]:
    """(account, partition) of accounts whose timer is over, longest first."""
    columns = tables.accounts.c
    query = (
        select(columns.account, columns.partition)
        .where(columns.partition.in_(sorted(partitions)), columns.due_at <= now)
        .order_by(columns.due_at)
        .limit(limit)
    )
    return [(record.account, record.partition) for record in connection.execute(query)]


def next_due_ms(connection: Connection, tables: HolderTables, partitions: Collection[int]) -> int | None:
    """When the next timer of these partitions is over, Unix ms; None: no timer."""
    parameters = {"partitions": sorted(partitions)}
    due_at: int | None = connection.execute(_next_due(tables.accounts), parameters).scalar_one_or_none()
    return due_at


@lru_cache(maxsize=64)
def _next_due(accounts: Table) -> Any:
    of_these = accounts.c.partition.in_(bindparam("partitions", expanding=True))
    return select(func.min(accounts.c.due_at)).where(of_these)


def adopt_partitions(connection: Connection, tables: HolderTables, partition_count: int) -> int:
    """Gives accounts of partitions that no longer exist (a topic made anew with fewer) to those that do."""
    columns = tables.accounts.c
    statement = (
        update(tables.accounts)
        .where(columns.partition >= partition_count)
        .values(partition=columns.partition % partition_count)
    )
    return connection.execute(statement).rowcount


def _values(row: Row) -> dict[str, object]:
    return {
        "account": row.account,
        "partition": row.partition,
        "epoch": row.state.epoch,
        "version": row.version,
        "due_at": row.due_at_ms,
        "state": row.state.to_json(),
    }


def _expect(written: int, wanted: int) -> None:
    if written != wanted:
        raise VersionMoved(f"{wanted - written} of {wanted} accounts were written by another holder")
