"""Statements about the client's accounts: its identity, wakes, account rows and the counts of their operations.

Only the dispatcher's passes and replies lock account rows. Everybody inserts wakes; a pass deletes those of the
accounts that it has locked, and counts afterwards, so what a wake announced is always counted (rule 1).
"""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    JSON,
    Connection,
    Integer,
    Select,
    Table,
    Text,
    bindparam,
    cast,
    delete,
    func,
    insert,
    literal,
    select,
    update,
)
from sqlalchemy.dialects import postgresql

from celery_durable.errors import ConfigurationError
from celery_durable.permits.messages import Declared, Reason
from celery_durable.permits.queue import AccountState, GroupCounts, new_account, restored_account
from celery_durable.store.clock import now_ms
from celery_durable.store.schema import PERMIT_STATES, QUEUED, Tables
from celery_durable.store.sql import Dialect, among, database_now, dialect_of, execute_many, in_states, insert_new

REPORT_SEQ = "report_seq"
"""The counter that numbers this database's reports."""

Counts = dict[str, dict[str, GroupCounts]]
"""By account, by group."""


def client_identity(connection: Connection, tables: Tables, client_id: str) -> tuple[str, str]:
    """(client_id, incarnation) of this database; its row is made on first use. Safe when processes race.

    :raises ConfigurationError: the database belongs to another ``client_id``.
    """
    client = tables.client
    rows = connection.execute(_identity(client)).all()
    if not rows:
        new = {"client_id": client_id, "incarnation": uuid.uuid4().hex, "created_at": now_ms()}
        connection.execute(insert_new(dialect_of(connection), client).values(new))
        rows = connection.execute(_identity(client)).all()
    for row in rows:
        if row.client_id != client_id:
            raise ConfigurationError(
                f"client_id = {client_id!r}: this database belongs to client_id {row.client_id!r}; use that one, "
                "or give this service a database, a database_schema or a table_prefix of its own"
            )
    return str(rows[0].client_id), str(rows[0].incarnation)


@lru_cache(maxsize=64)
def _identity(client: Table) -> Select[Any]:
    return select(client.c.client_id, client.c.incarnation)


def wake(connection: Connection, tables: Tables, keys: Iterable[str | None]) -> None:
    """Inserts a wake for each account; None is no account."""
    wake_declaring(connection, tables, {key: Declared() for key in keys if key is not None})


def wake_declaring(connection: Connection, tables: Tables, declared: Mapping[str, Declared]) -> None:
    """Inserts a wake for each account, with what the code of its operations declares."""
    rows = [
        {"account": key, "limit": each.limit, "group_limit": each.group_limit, "mutex": each.mutex or None}
        for key, each in sorted(declared.items())
    ]
    if rows:
        connection.execute(insert(tables.wakes), rows)


@dataclass(frozen=True, slots=True)
class AccountWrite:
    """An account's row after a pass. ``reply``: the reply that this pass applied, as JSON, or None to keep it."""

    state: AccountState
    blocked: Mapping[str, Reason]
    due_at_ms: int | None
    reply: str | None = None


class Accounts:
    """The statements, built once per process. All of them work inside the caller's transaction.

    :param waiting_count_max: how far waiting operations of a group are counted.
    """

    def __init__(self, tables: Tables, dialect: Dialect, *, waiting_count_max: int) -> None:
        self._tables = tables
        self._dialect: Dialect = dialect
        self._next_woken = _next_woken(tables)
        self._due = _due(tables)
        self._take_wakes = _take_wakes(tables, dialect)
        self._in_use = _in_use(tables, dialect)
        self._waiting = _waiting(tables, dialect, waiting_count_max)
        accounts = tables.accounts
        named = among(accounts.c.account, "accounts", dialect)
        rows = select(accounts.c.account, accounts.c.state).where(named).order_by(accounts.c.account)
        self._lock = {wait: rows.with_for_update(skip_locked=not wait) for wait in (False, True)}
        self._create = {wait: _create(accounts, dialect, wait=wait) for wait in (False, True)}
        self._delete = delete(accounts).where(named)
        self._delete_wakes = delete(tables.wakes).where(among(tables.wakes.c.account, "accounts", dialect))
        self._clock = select(
            now_ms().label("now_ms"),
            select(tables.counters.c.value).where(tables.counters.c.name == REPORT_SEQ).scalar_subquery().label("seq"),
        )
        self._write = (
            update(accounts)
            .where(accounts.c.account == bindparam("key"))
            .values(
                state=bindparam("state"),
                blocked=bindparam("blocked", type_=JSON(none_as_null=True)),
                due_at=bindparam("due_at"),
                reply=func.coalesce(bindparam("reply", type_=Text), accounts.c.reply),
            )
        )

    def woken(self, connection: Connection, after: str, limit: int) -> list[str]:
        """At most ``limit`` accounts with a wake, in order, from the first above ``after`` on and round again.

        Its cost follows the accounts found, not the wakes they have.
        """
        found = list(connection.scalars(self._next_woken, {"after": after, "limit": limit}))
        if after and len(found) < limit:
            again = connection.scalars(self._next_woken, {"after": "", "limit": limit - len(found)})
            # Never compared here: the database may sort in another order than Python.
            found = list(dict.fromkeys([*found, *again]))
        return found

    def due(self, connection: Connection, limit: int) -> tuple[list[str], float]:
        """(accounts that are due, longest overdue first; seconds until the next one is, or inf)."""
        accounts: list[str] = []
        for account, left_ms in connection.execute(self._due, {"limit": limit + 1}):
            if left_ms > 0 or len(accounts) == limit:
                return accounts, max(0.0, left_ms / 1000)
            accounts.append(account)
        return accounts, float("inf")

    def lock(self, connection: Connection, keys: Collection[str], *, wait: bool) -> dict[str, str | None]:
        """Locks the accounts' rows until the transaction ends, creating those that are missing.

        Returns the state of each as it is stored, unread: one that cannot be read is no reason to lock none. None: it
        had no row before.

        :param wait: waits for rows that others hold, in the order of their keys; else leaves them out.
        """
        parameters = {"accounts": sorted(keys)}
        locked: dict[str, str | None] = {}
        while True:
            locked.update((row.account, row.state) for row in connection.execute(self._lock[wait], parameters))
            missing = [key for key in parameters["accounts"] if key not in locked]
            if not missing:
                return locked
            created = self._made(connection, missing, wait=wait)
            locked.update(dict.fromkeys(created))
            if not wait or len(created) == len(missing):
                return locked

    def _made(self, connection: Connection, missing: list[str], *, wait: bool) -> Sequence[str]:
        states = [new_account(key).to_json() for key in missing]
        if self._dialect == "postgresql":
            return connection.scalars(self._create[wait], {"accounts": missing, "states": states}).all()
        rows = [{"account": key, "state": state} for key, state in zip(missing, states, strict=True)]
        return connection.scalars(self._create[wait], rows).all()

    def clock(self, connection: Connection) -> tuple[int, int]:
        """(the database's time in Unix ms, the highest report ``seq`` ever drawn)."""
        row = connection.execute(self._clock).one()
        return int(row.now_ms), int(row.seq or 0)

    def take_wakes(self, connection: Connection, locked: Collection[str]) -> dict[str, Declared]:
        """Deletes the wakes of accounts that the caller has locked. Returns what they declare, the smallest each."""
        parameters = {"accounts": sorted(locked)}
        rows = connection.execute(self._take_wakes, parameters).all()
        if self._dialect == "sqlite" and rows:
            # SQLite has no DELETE in a WITH; its one writer lock keeps other wakes out between the two statements.
            connection.execute(self._delete_wakes, parameters)
        return {
            row.account: Declared(limit=row.limit, group_limit=row.group_limit, mutex=bool(row.mutex))
            for row in rows
            if row.limit is not None or row.group_limit is not None or row.mutex
        }

    def counts(self, connection: Connection, locked: Collection[str]) -> Counts:
        """In use and waiting of each group. To be called after :meth:`take_wakes`.

        Its cost follows the groups and what they use, not how many operations wait (case A29).
        """
        parameters = {"accounts": sorted(locked)}
        found: Counts = {key: {} for key in locked}
        for account, group, in_use in connection.execute(self._in_use, parameters):
            found[account][group] = GroupCounts(in_use=int(in_use))
        for account, group, waiting, oldest_wait_ms in connection.execute(self._waiting, parameters):
            before = found[account].get(group)
            found[account][group] = GroupCounts(
                in_use=before.in_use if before else 0,
                waiting=int(waiting),
                oldest_wait_ms=max(0, int(oldest_wait_ms or 0)),
            )
        return found

    def write(self, connection: Connection, writes: Iterable[AccountWrite]) -> None:
        """Writes locked rows."""
        rows: list[Mapping[str, Any]] = [
            {
                "key": write.state.account,
                "state": write.state.to_json(),
                "blocked": dict(write.blocked) or None,
                "due_at": write.due_at_ms,
                "reply": write.reply,
            }
            for write in writes
        ]
        execute_many(connection, self._write, rows)

    def delete(self, connection: Connection, keys: Collection[str]) -> None:
        """Deletes locked rows."""
        if keys:
            connection.execute(self._delete, {"accounts": sorted(keys)})

    def reset_all(self, connection: Connection, batch: int = 1_000) -> int:
        """Voids what every account was given, and wakes it: the database was restored from an earlier state.

        Returns how many accounts there are.
        """
        accounts = self._tables.accounts
        after, done = "", 0
        statement = (
            select(accounts.c.account, accounts.c.state)
            .where(accounts.c.account > bindparam("after"))
            .order_by(accounts.c.account)
            .limit(batch)
            .with_for_update()
        )
        reset = update(accounts).where(accounts.c.account == bindparam("key")).values(state=bindparam("state"))
        while rows := connection.execute(statement, {"after": after}).all():
            states = [restored_account(AccountState.from_json(row.state)) for row in rows]
            execute_many(connection, reset, [{"key": one.account, "state": one.to_json()} for one in states])
            wake(connection, self._tables, [one.account for one in states])
            after, done = rows[-1].account, done + len(rows)
        return done


def _create(accounts: Table, dialect: Dialect, *, wait: bool) -> Any:
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


def _next_woken(tables: Tables) -> Select[Any]:
    wakes = tables.wakes
    first = select(func.min(wakes.c.account).label("account"), literal(1).label("place")).where(
        wakes.c.account > bindparam("after")
    )
    walk = first.cte("woken", recursive=True)
    following = select(func.min(wakes.c.account)).where(wakes.c.account > walk.c.account).scalar_subquery()
    limit = cast(bindparam("limit"), Integer)
    walk = walk.union_all(select(following, walk.c.place + 1).where(walk.c.account.is_not(None), walk.c.place < limit))
    return select(walk.c.account).where(walk.c.account.is_not(None))


def _due(tables: Tables) -> Select[Any]:
    accounts = tables.accounts
    return (
        select(accounts.c.account, (accounts.c.due_at - database_now()).label("left_ms"))
        .where(accounts.c.due_at.is_not(None))
        .order_by(accounts.c.due_at)
        .limit(bindparam("limit"))
    )


def _take_wakes(tables: Tables, dialect: Dialect) -> Select[Any]:
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


def _in_use(tables: Tables, dialect: Dialect) -> Select[Any]:
    operations = tables.operations
    return (
        select(operations.c.account, operations.c.group, func.count())
        .where(
            among(operations.c.account, "accounts", dialect),
            operations.c.account.is_not(None),
            in_states(operations, PERMIT_STATES),
        )
        .group_by(operations.c.account, operations.c.group)
    )


def _waiting(tables: Tables, dialect: Dialect, count_max: int) -> Select[Any]:
    """A loose index scan: one step an (account, group), whatever waits in it."""
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
    return select(walk.c.account, walk.c.group, waiting, oldest).where(walk.c.group.is_not(None))
