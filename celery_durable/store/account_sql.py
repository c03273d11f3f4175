"""The SQL of :mod:`celery_durable.store.accounts`."""

from __future__ import annotations

import zlib
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CompoundSelect,
    Integer,
    Select,
    Table,
    Text,
    bindparam,
    cast,
    delete,
    func,
    literal,
    literal_column,
    null,
    select,
    union_all,
    update,
)
from sqlalchemy.dialects import postgresql

from celery_durable.store.arrays import from_rows
from celery_durable.store.clock import now_ms
from celery_durable.store.prepared import PSYCOPG
from celery_durable.store.schema import PERMIT_STATES, QUEUED, Tables
from celery_durable.store.sql import NOT_WAITING_FOR_DISK, Dialect, among, database_now, in_states, insert_new

REPORT_SEQ = "report_seq"
"""The counter that numbers this database's reports."""
WRITTEN = {"account": "text", "state": "text", "blocked": "json", "due_at": "bigint", "reply": "text"}
"""What a pass writes of an account. ``reply`` null: it stays as it is."""


def write(accounts: Table) -> Any:
    """Writes one locked row, of :data:`WRITTEN`."""
    return (
        update(accounts)
        .where(accounts.c.account == bindparam("key"))
        .values(
            state=bindparam("state"),
            blocked=bindparam("blocked", type_=JSON(none_as_null=True)),
            due_at=bindparam("due_at"),
            reply=func.coalesce(bindparam("reply", type_=Text), accounts.c.reply),
        )
    )


def write_many(accounts: Table, *, waits_for_disk: bool) -> str:
    """The same for many rows at once, for psycopg.

    :param waits_for_disk: whether the transaction's commit does.
    """
    table = PSYCOPG.identifier_preparer.format_table(accounts)
    return f"""
        UPDATE {table} AS present SET state = new.state,
            blocked = nullif(new.blocked::text, 'null')::json, due_at = new.due_at,
            reply = coalesce(new.reply, present.reply)
        FROM {from_rows(WRITTEN)} WHERE present.account = new.account
        {"" if waits_for_disk else f"RETURNING {NOT_WAITING_FOR_DISK}"}
        """


def create(accounts: Table, dialect: Dialect, *, wait: bool) -> Any:
    """Makes rows that are missing. Who waits for no lock leaves out those that another transaction is making.

    On PostgreSQL an insert waits for such a transaction in any case, while this one may hold locks that the other one
    waits for. Therefore whoever makes a row has an advisory lock of its key first, which can be tried.
    """
    if dialect == "sqlite":
        return insert_new(dialect, accounts).returning(accounts.c.account)
    texts = postgresql.ARRAY(Text)
    missing = select(
        func.unnest(bindparam("accounts", type_=texts)).label("account"),
        func.unnest(bindparam("states", type_=texts)).label("state"),
    ).subquery("missing")
    key = func.hashtextextended(missing.c.account, zlib.crc32(accounts.fullname.encode()))
    have = cast(func.pg_advisory_xact_lock(key), Text).is_not(None) if wait else func.pg_try_advisory_xact_lock(key)
    source = select(missing.c.account, missing.c.state).where(have)
    made = insert_new(dialect, accounts).from_select(["account", "state"], source)
    return made.returning(accounts.c.account)


def clock(tables: Tables) -> Select[Any]:
    """The database's time, and the highest report ``seq`` ever drawn."""
    seq = select(tables.counters.c.value).where(tables.counters.c.name == REPORT_SEQ).scalar_subquery()
    return select(now_ms().label("now_ms"), seq.label("seq"))


def pending(tables: Tables) -> CompoundSelect[Any]:
    """Accounts that are due or the next one that will be (``left_ms``), and those that have a wake (``left_ms`` null).

    Its cost follows the accounts found, not the wakes they have.
    """
    accounts, wakes = tables.accounts, tables.wakes
    due = (
        select(accounts.c.account, (accounts.c.due_at - database_now()).label("left_ms"), literal(0).label("place"))
        .where(accounts.c.due_at.is_not(None))
        .order_by(accounts.c.due_at)
        .limit(bindparam("due_max"))
        .subquery("due")
    )
    first = select(func.min(wakes.c.account).label("account"), literal(1).label("place")).where(
        wakes.c.account > bindparam("after")
    )
    walk = first.cte("woken", recursive=True)
    following = select(func.min(wakes.c.account)).where(wakes.c.account > walk.c.account).scalar_subquery()
    limit = cast(bindparam("woken_max"), Integer)
    walk = walk.union_all(select(following, walk.c.place + 1).where(walk.c.account.is_not(None), walk.c.place < limit))
    woken = select(walk.c.account, cast(null(), BigInteger), walk.c.place).where(walk.c.account.is_not(None))
    return union_all(select(due), woken)


def facts(tables: Tables, count_max: int) -> CompoundSelect[Any]:
    """What a pass reads of locked accounts, at one moment, in one statement for PostgreSQL; it takes their wakes.

    Rows of ``kind``: ``declared`` by wakes, ``in_use`` and ``waiting`` of a group, and one ``clock``.
    """
    no_text, no_number = cast(null(), Text), cast(null(), BigInteger)

    def rows(kind: str, source: Any, *columns: Any) -> Select[Any]:
        return select(literal_column(f"'{kind}'").label("kind"), *columns).select_from(source)

    declared = take_wakes(tables, "postgresql").subquery("declared")
    used = in_use(tables, "postgresql").subquery("used")
    queued = waiting(tables, "postgresql", count_max).subquery("queued")
    time = clock(tables).subquery("clock")
    return union_all(
        rows(
            "declared",
            declared,
            *_named(declared, "account"),
            no_text,
            *_named(declared, "limit", "group_limit", "mutex"),
        ),
        rows("in_use", used, *_named(used, "account", "group", "in_use"), no_number, no_number),
        rows("waiting", queued, *_named(queued, "account", "group", "waiting", "oldest_wait_ms"), no_number),
        rows("clock", time, no_text, no_text, *_named(time, "now_ms", "seq"), no_number),
    )


def _named(source: Any, *names: str) -> list[Any]:
    return [source.c[name] for name in names]


def take_wakes(tables: Tables, dialect: Dialect) -> Select[Any]:
    """What the accounts' wakes declare, the smallest each; on PostgreSQL it deletes them."""
    wakes = tables.wakes
    chosen = among(wakes.c.account, "accounts", dialect)
    if dialect == "postgresql":
        gone = delete(wakes).where(chosen).returning(*wakes.c).cte("gone")
        return _smallest_declared(gone)
    return _smallest_declared(wakes).where(chosen)


def _smallest_declared(wakes: Any) -> Select[Any]:
    return select(
        wakes.c.account,
        func.min(wakes.c.limit).label("limit"),
        func.min(wakes.c.group_limit).label("group_limit"),
        func.max(cast(wakes.c.mutex, Integer)).label("mutex"),
    ).group_by(wakes.c.account)


def in_use(tables: Tables, dialect: Dialect) -> Select[Any]:
    """How many operations of each group hold a permit."""
    operations = tables.operations
    return (
        select(operations.c.account, operations.c.group, func.count().label("in_use"))
        .where(
            among(operations.c.account, "accounts", dialect),
            operations.c.account.is_not(None),
            in_states(operations, PERMIT_STATES),
        )
        .group_by(operations.c.account, operations.c.group)
    )


def waiting(tables: Tables, dialect: Dialect, count_max: int) -> Select[Any]:
    """How many of each group wait, up to ``count_max``, and how long the first has.

    A loose index scan: one step an (account, group), whatever waits in it.
    """
    accounts, operations = tables.accounts, tables.operations
    first, following, counted, head = (operations.alias(name) for name in ("first", "following", "counted", "head"))
    walk = (
        select(
            accounts.c.account,
            select(func.min(first.c.group))
            .where(first.c.account == accounts.c.account, in_states(first, (QUEUED,)))
            .scalar_subquery()
            .label("group"),
        )
        .where(among(accounts.c.account, "accounts", dialect))
        .cte("walk", recursive=True)
    )
    next_group = (
        select(func.min(following.c.group))
        .where(
            following.c.account == walk.c.account,
            following.c.group > walk.c.group,
            in_states(following, (QUEUED,)),
        )
        .scalar_subquery()
    )
    walk = walk.union_all(select(walk.c.account, next_group).where(walk.c.group.is_not(None)))

    def of_group(table: Any) -> list[Any]:
        return [table.c.account == walk.c.account, table.c.group == walk.c.group, in_states(table, (QUEUED,))]

    def in_order(statement: Any, table: Any) -> Any:
        # The order costs nothing in the index, and keeps the planner from a scan that would first pass all that ended.
        return statement.where(*of_group(table)).order_by(table.c.priority.desc(), table.c.order_no).correlate(walk)

    capped = in_order(select(literal(1).label("one")), counted).limit(count_max).subquery()
    waiting = select(func.count()).select_from(capped).scalar_subquery()
    oldest = in_order(select(database_now() - head.c.enqueued_at), head).limit(1).scalar_subquery()
    found = select(walk.c.account, walk.c.group, waiting.label("waiting"), oldest.label("oldest_wait_ms"))
    return found.where(walk.c.group.is_not(None))
