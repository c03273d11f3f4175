"""Statements about the client's accounts: its identity, wakes, account rows and the counts of their operations.

Only the dispatcher's passes and replies lock account rows. Everybody inserts wakes; a pass deletes those of the
accounts that it has locked, and counts afterwards, so what a wake announced is always counted (rule 1).
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Select, Table, bindparam, delete, insert, select, update

from celery_durable.errors import ConfigurationError
from celery_durable.permits.messages import Declared, Reason
from celery_durable.permits.queue import AccountState, GroupCounts, new_account, restored_account
from celery_durable.store import account_sql
from celery_durable.store.account_sql import WRITTEN
from celery_durable.store.arrays import parameters
from celery_durable.store.clock import now_ms
from celery_durable.store.schema import Tables
from celery_durable.store.sql import Dialect, among, dialect_of, execute_many, insert_new

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


@dataclass(frozen=True, slots=True)
class Pending:
    """What needs a pass."""

    due: Sequence[str]
    """Accounts that are due, longest overdue first."""
    next_s: float
    """Seconds until the next one is due, or inf; 0 if more are due than were asked for."""
    woken: Sequence[str]
    """Accounts with a wake."""


@dataclass(slots=True)
class Facts:
    """What is so of locked accounts, all at one moment."""

    now_ms: int
    """The database's time in Unix ms."""
    seq_newest: int
    """The highest report ``seq`` ever drawn."""
    declared: dict[str, Declared]
    """What the accounts' wakes declared, the smallest each."""
    counts: Counts


class Accounts:
    """The statements, built once per process. All of them work inside the caller's transaction.

    :param waiting_count_max: how far waiting operations of a group are counted.
    """

    def __init__(self, tables: Tables, dialect: Dialect, *, waiting_count_max: int) -> None:
        self._tables = tables
        self._dialect: Dialect = dialect
        self._pending = account_sql.pending(tables)
        self._facts = account_sql.facts(tables, waiting_count_max)
        self._take_wakes = account_sql.take_wakes(tables, dialect)
        self._in_use = account_sql.in_use(tables, dialect)
        self._waiting = account_sql.waiting(tables, dialect, waiting_count_max)
        accounts = tables.accounts
        named = among(accounts.c.account, "accounts", dialect)
        rows = select(accounts.c.account, accounts.c.state).where(named).order_by(accounts.c.account)
        self._lock = {wait: rows.with_for_update(skip_locked=not wait) for wait in (False, True)}
        self._create = {wait: account_sql.create(accounts, dialect, wait=wait) for wait in (False, True)}
        self._delete = delete(accounts).where(named)
        self._delete_wakes = delete(tables.wakes).where(among(tables.wakes.c.account, "accounts", dialect))
        self._clock = account_sql.clock(tables)
        self._write = account_sql.write(accounts)
        self._write_many = [account_sql.write_many(accounts, waits_for_disk=waits) for waits in (False, True)]

    def pending(self, connection: Connection, *, due_max: int, after: str, woken_max: int) -> Pending:
        """At most so many accounts that are due, and that have a wake: in order, from the first above ``after`` on and
        round again. Its cost follows the accounts found, not the wakes they have.
        """
        values = {"due_max": due_max + 1, "after": after, "woken_max": woken_max}
        rows = connection.execute(self._pending, values).all()
        if after and sum(row.left_ms is None for row in rows) < woken_max:
            again = connection.execute(self._pending, {**values, "after": "", "due_max": 0})
            rows = [*rows, *again]
        # Sorted by what the database says: it may sort names in another order than Python.
        woken = dict.fromkeys(row.account for row in rows if row.left_ms is None)
        by_due = sorted((row.left_ms, row.account) for row in rows if row.left_ms is not None)
        overdue = [account for left_ms, account in by_due[:due_max] if left_ms <= 0]
        rest_ms = [max(0, left_ms) for left_ms, _ in by_due[len(overdue) :]]
        return Pending(overdue, min(rest_ms, default=float("inf")) / 1000, list(woken)[:woken_max])

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

    def facts(self, connection: Connection, locked: Collection[str]) -> Facts:
        """Deletes the wakes of accounts that the caller has locked, and reads what is so: what a wake announced is
        counted.

        Its cost follows the groups and what they use, not how many operations wait (case A29).
        """
        keys = {"accounts": sorted(locked)}
        facts = Facts(0, 0, {}, {key: {} for key in locked})
        for kind, account, group, *numbers in self._fact_rows(connection, keys):
            if kind == "clock":
                facts.now_ms, facts.seq_newest = int(numbers[0]), int(numbers[1] or 0)
            elif kind == "declared":
                limit, group_limit, mutex = numbers
                if limit is not None or group_limit is not None or mutex:
                    facts.declared[account] = Declared(limit=limit, group_limit=group_limit, mutex=bool(mutex))
            else:
                before = facts.counts[account].get(group, GroupCounts())
                facts.counts[account][group] = (
                    replace(before, in_use=int(numbers[0]))
                    if kind == "in_use"
                    else replace(before, waiting=int(numbers[0]), oldest_wait_ms=max(0, int(numbers[1] or 0)))
                )
        return facts

    def _fact_rows(self, connection: Connection, keys: Mapping[str, Any]) -> Iterable[Sequence[Any]]:
        if self._dialect == "postgresql":
            return connection.execute(self._facts, keys)
        # SQLite has no DELETE in a WITH; its one writer lock keeps all others out between the statements.
        found: list[Sequence[Any]] = []
        for account, *numbers in connection.execute(self._take_wakes, keys).all():
            found.append(("declared", account, None, *numbers))
        if found:
            connection.execute(self._delete_wakes, keys)
        found += [("in_use", *row, None, None) for row in connection.execute(self._in_use, keys)]
        found += [("waiting", *row, None) for row in connection.execute(self._waiting, keys)]
        return [*found, ("clock", None, None, *self.clock(connection), None)]

    def write(self, connection: Connection, writes: Iterable[AccountWrite], *, waits_for_disk: bool) -> None:
        """Writes locked rows.

        :param waits_for_disk: False: on PostgreSQL the transaction's commit does not.
        """
        rows: list[dict[str, Any]] = [
            {
                "account": write.state.account,
                "state": write.state.to_json(),
                "blocked": dict(write.blocked) or None,
                "due_at": write.due_at_ms,
                "reply": write.reply,
            }
            for write in writes
        ]
        if not rows:
            return
        if self._dialect == "postgresql":
            connection.exec_driver_sql(self._write_many[waits_for_disk], parameters(WRITTEN, rows))
        else:
            connection.execute(self._write, [{"key": row.pop("account"), **row} for row in rows])

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
