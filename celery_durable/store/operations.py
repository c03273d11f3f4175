"""Statements about operations that callers write: insert, read, cancel, forget.

Insert only inserts (rule 1): no lock that another transaction may wait for, the same ID inserted twice at once
excepted. Cancel writes the operation's own row and a wake, never an account's row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from sqlalchemy import (
    BigInteger,
    Connection,
    Insert,
    Select,
    bindparam,
    case,
    func,
    insert,
    literal_column,
    null,
    select,
    update,
)

from celery_durable.errors import DuplicateOperationError
from celery_durable.store.bulk import BulkInsert
from celery_durable.store.clock import now_ms
from celery_durable.store.prepared import Prepared
from celery_durable.store.schema import ADMITTED, CANCELLED, ENDED_STATES, QUEUED, RUNNING, SCHEDULED, Tables
from celery_durable.store.sql import Dialect, dialect_insert, dialect_of, is_psycopg, parts
from celery_durable.store.untold import Untold

_PAYLOAD_COLUMNS = (
    "id",
    "content_type",
    "content_encoding",
    "body",
    "digest",
    "headers",
    "properties",
    "publish",
    "policy",
)
_WAKE_COLUMNS = ("account", "limit", "group_limit", "mutex")

Cancelled = Literal["cancelled", "requested", "ended", "unknown"]
"""``cancelled``: it ended now; ``requested``: it runs, and its worker will be told; ``ended``: it had ended before;
``unknown``: there is no such operation."""


BATCH_ROWS = 1_000
BATCH_BYTES = 4_000_000
"""A batch of new operations ends at so many rows, or bytes of bodies: that bounds memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewOperation:
    """One operation to insert. Its state follows from it: an ETA makes it ``scheduled``, else an account ``queued``,
    else ``admitted`` and due at once."""

    id: str
    task: str
    queue: str
    content_type: str
    content_encoding: str
    body: bytes
    digest: str
    headers: dict[str, Any]
    properties: dict[str, Any]
    publish: dict[str, Any]
    policy: dict[str, Any]
    account: str | None = None
    group: str = ""
    limit: int | None = None
    group_limit: int | None = None
    mutex: bool = False
    priority: int = 0
    retries: int = 0
    eta_delay_ms: int | None = None
    eta_at_ms: int | None = None
    expires_delay_ms: int | None = None
    expires_at_ms: int | None = None
    retention_ms: int | None = None

    @property
    def state(self) -> str:
        """The state that it is inserted in."""
        if self.eta_delay_ms is not None or self.eta_at_ms is not None:
            return SCHEDULED
        return ADMITTED if self.account is None else QUEUED


@dataclass(frozen=True, slots=True)
class OperationView:
    """An operation as its caller may see it. Times are Unix ms of the database's clock."""

    id: str
    task: str
    state: str
    account: str | None
    group: str
    queue: str
    attempt: int
    retries: int
    sends: int
    worker: str | None
    due_at: int | None
    expires_at: int | None
    cancel_requested_at: int | None
    enqueued_at: int
    admitted_at: int | None
    started_at: int | None
    ended_at: int | None
    result: bytes | None
    result_content_type: str | None
    result_content_encoding: str | None
    error: str | None
    traceback: str | None
    blocked: dict[str, str] | None
    """Why each waiting group of its account waits, as the last pass found it."""


def statements(connection: Connection, tables: Tables) -> Operations:
    """The statements for these tables and the connection's kind of database, built once."""
    return statements_for(tables, dialect_of(connection), psycopg=is_psycopg(connection))


@lru_cache(maxsize=64)
def statements_for(tables: Tables, dialect: Dialect, *, psycopg: bool) -> Operations:
    """The same for a kind of database, and whether its driver is psycopg."""
    return Operations(tables, dialect, psycopg=psycopg)


class Operations:
    """The statements of one client's tables. All work inside the caller's transaction."""

    def __init__(self, tables: Tables, dialect: Dialect, *, psycopg: bool) -> None:
        self._tables = tables
        self._insert = _insert_operation(tables, dialect)
        self._insert_returning = self._insert.returning(tables.operations.c.id)
        self._payload = insert(tables.payloads)
        self._untold = Untold(tables)
        self._wake = insert(tables.wakes)
        self._bulk = BulkInsert(tables) if psycopg else None
        self._insert_all = Prepared(_insert_all(tables, self._insert)) if psycopg else None
        self._cancel = _cancel(tables)
        self._read = _read(tables)
        self._state = select(tables.operations.c.state).where(tables.operations.c.id == bindparam("key"))

    def insert(self, connection: Connection, new: NewOperation) -> bool:
        """Inserts the operation, its payload and its wake: one statement by psycopg. True: the ID is there already.

        :raises DuplicateOperationError: the ID is there with another task or other arguments (case A1).
        """
        while True:
            if self._insert_one(connection, new):
                return False
            known = self.digests(connection, [new.id])
            # Empty: retention deleted the old row between the two statements.
            if known:
                _require_same(new, known[new.id])
                return True

    def insert_raw(self, driver_connection: Any, new: NewOperation) -> bool:
        """As :meth:`insert` on PostgreSQL, by psycopg alone, in autocommit. False: look with :meth:`insert` why not.

        :raises psycopg.Error: whatever it is, :meth:`insert` raises it again as SQLAlchemy's.
        """
        return self._insert_all is not None and self._insert_all.first(driver_connection, _all_rows(new)) is not None

    def _insert_one(self, connection: Connection, new: NewOperation) -> bool:
        if self._insert_all is not None:
            return self._insert_all.execute(connection, _all_rows(new)).first() is not None
        if connection.execute(self._insert, _operation_row(new)).rowcount == 0:
            return False
        connection.execute(self._payload, _payload_row(new))
        if new.account is not None:
            connection.execute(self._wake, _wake_row(new))
        return True

    def insert_many(self, connection: Connection, batch: Sequence[NewOperation]) -> list[str]:
        """Inserts a batch in a few statements; one wake for each account and what is declared for it.

        Returns the ID of each item that was there already, or is in the batch before it.

        :raises DuplicateOperationError: as :meth:`insert`; the caller rolls back.
        """
        if len(batch) == 1:
            return [batch[0].id] if self.insert(connection, batch[0]) else []
        first: dict[str, NewOperation] = {}
        repeated = []
        for new in batch:
            if first.setdefault(new.id, new) is not new:
                _require_same(new, first[new.id].digest)
                repeated.append(new.id)
        if not first:
            return []
        inserted = self._insert_new(connection, list(first.values()))
        duplicates = []
        missing = [key for key in first if key not in inserted]
        known = self.digests(connection, missing)
        for key in missing:
            if key in known:
                _require_same(first[key], known[key])
                duplicates.append(key)
            elif self.insert(connection, first[key]):  # retention deleted the old row between the two statements
                duplicates.append(key)
        return duplicates + repeated

    def _insert_new(self, connection: Connection, batch: Sequence[NewOperation]) -> set[str]:
        """Inserts those whose ID is not there, in one statement by psycopg. Returns their IDs."""
        if self._bulk is not None:
            return self._bulk.insert(connection, [_all_rows(new) for new in batch])
        inserted = set(connection.scalars(self._insert_returning, [_operation_row(new) for new in batch]))
        rows = [new for new in batch if new.id in inserted]
        if rows:
            connection.execute(self._payload, [_payload_row(new) for new in rows])
        wakes = {tuple(_wake_row(new).values()): _wake_row(new) for new in rows if new.account is not None}
        if wakes:
            connection.execute(self._wake, list(wakes.values()))
        return inserted

    def digests(self, connection: Connection, ids: Sequence[str]) -> dict[str, str]:
        """The digest of task and arguments of those operations that exist."""
        payloads = self._tables.payloads
        found: dict[str, str] = {}
        for some in parts(ids):
            statement = select(payloads.c.id, payloads.c.digest).where(payloads.c.id.in_(some))
            found.update((row.id, row.digest) for row in connection.execute(statement))
        return found

    def read(self, connection: Connection, operation_id: str) -> OperationView | None:
        """The operation, or None if there is none (or no more: retention deletes ended ones)."""
        row = connection.execute(self._read, {"key": operation_id}).one_or_none()
        return None if row is None else OperationView(**row._mapping)

    def state(self, connection: Connection, operation_id: str) -> str | None:
        """The operation's state alone: what a waiting caller polls."""
        return connection.execute(self._state, {"key": operation_id}).scalar_one_or_none()

    def cancel(
        self, connection: Connection, operation_id: str, reason: str = "cancelled", *, tells: bool = False
    ) -> Cancelled:
        """Ends an operation that does not run; asks the worker of one that runs to stop it.

        Takes no account's lock: it writes the operation's row and, where it ended one with an account, a wake.

        :param tells: the app's own result backend is to be told of an end.
        """
        row = connection.execute(self._cancel, {"key": operation_id, "reason": reason}).one_or_none()
        if row is None:
            return "unknown" if self.state(connection, operation_id) is None else "ended"
        if row.state == RUNNING:
            return "requested"
        if tells:
            self._untold.mark(connection, [operation_id])
        if row.account is not None:
            connection.execute(self._wake, {"account": row.account})
        return "cancelled"

    def forget(self, connection: Connection, operation_id: str) -> None:
        """Drops the result of an ended operation. The row stays: it still keeps its ID from being enqueued again."""
        operations = self._tables.operations
        connection.execute(
            update(operations)
            .where(operations.c.id == operation_id, operations.c.state.in_(ENDED_STATES))
            .values(result=None, result_content_type=None, result_content_encoding=None, traceback=None)
        )


def _insert_operation(tables: Tables, dialect: Dialect) -> Any:
    def after(at: str, delay: str) -> Any:
        return func.coalesce(bindparam(at, type_=BigInteger), now_ms() + bindparam(delay, type_=BigInteger))

    values = {
        **{
            name: bindparam(name, type_=tables.operations.c[name].type)
            for name in ("id", "task", "account", "queue", "state", "priority", "retries", "retention_ms")
        },
        "group": bindparam("group_", type_=tables.operations.c.group.type),
        "due_at": after("eta_at", "eta_delay"),
        "expires_at": after("expires_at_ms", "expires_delay"),
        "admitted_at": now_ms() + bindparam("admitted_delay", type_=BigInteger),
        "enqueued_at": now_ms(),
    }
    return dialect_insert(dialect, tables.operations).values(values).on_conflict_do_nothing(index_elements=["id"])


def _insert_all(tables: Tables, operation: Any) -> Select[Any]:
    """One statement: the operation, and only if it is new its payload and wake."""
    inserted = operation.returning(tables.operations.c.id).cte("inserted")
    payload = _insert_if(tables.payloads, _PAYLOAD_COLUMNS, "p_", inserted)
    wake = _insert_if(tables.wakes, _WAKE_COLUMNS, "w_", inserted, where="account")
    return select(inserted.c.id).add_cte(payload.cte("payload"), wake.cte("wake"))


def _insert_if(table: Any, names: Sequence[str], prefix: str, inserted: Any, where: str | None = None) -> Insert:
    source = select(*(bindparam(prefix + name, type_=table.c[name].type) for name in names)).select_from(inserted)
    if where is not None:
        source = source.where(bindparam(prefix + where, type_=table.c[where].type).is_not(None))
    return insert(table).from_select(list(names), source)


def _cancel(tables: Tables) -> Any:
    operations = tables.operations
    running = operations.c.state == literal_column(f"'{RUNNING}'")

    def unless_running(name: str, value: Any) -> Any:
        return case((running, operations.c[name]), else_=value)

    return (
        update(operations)
        .where(operations.c.id == bindparam("key"), operations.c.state.not_in(ENDED_STATES))
        .values(
            state=unless_running("state", CANCELLED),
            cancel_requested_at=func.coalesce(operations.c.cancel_requested_at, now_ms()),
            ended_at=unless_running("ended_at", now_ms()),
            due_at=unless_running("due_at", null()),
            error=unless_running("error", bindparam("reason")),
        )
        .returning(operations.c.state, operations.c.account)
    )


def _read(tables: Tables) -> Select[Any]:
    operations, accounts = tables.operations, tables.accounts
    columns: Iterable[Any] = (operations.c[name] for name in OperationView.__dataclass_fields__ if name != "blocked")
    return (
        select(*columns, accounts.c.blocked)
        .select_from(operations.outerjoin(accounts, accounts.c.account == operations.c.account))
        .where(operations.c.id == bindparam("key"))
    )


def _operation_row(new: NewOperation) -> dict[str, Any]:
    admitted = new.state == ADMITTED
    return {
        "id": new.id,
        "task": new.task,
        "account": new.account,
        "group_": new.group,
        "queue": new.queue,
        "state": new.state,
        "priority": new.priority,
        "retries": new.retries,
        "retention_ms": new.retention_ms,
        "eta_at": new.eta_at_ms,
        "eta_delay": 0 if admitted else new.eta_delay_ms,
        "admitted_delay": 0 if admitted else None,
        "expires_at_ms": new.expires_at_ms,
        "expires_delay": new.expires_delay_ms,
    }


def _payload_row(new: NewOperation) -> dict[str, Any]:
    return {name: getattr(new, name) for name in _PAYLOAD_COLUMNS}


def _wake_row(new: NewOperation) -> dict[str, Any]:
    return {"account": new.account, "limit": new.limit, "group_limit": new.group_limit, "mutex": new.mutex or None}


def _all_rows(new: NewOperation) -> dict[str, Any]:
    return {
        **_operation_row(new),
        **{f"p_{name}": value for name, value in _payload_row(new).items()},
        **{f"w_{name}": value for name, value in _wake_row(new).items()},
    }


def _require_same(new: NewOperation, digest: str) -> None:
    if new.digest != digest:
        raise DuplicateOperationError(
            f"task_id = {new.id!r}: an operation with this ID exists, with another task or other arguments than this "
            f"call of {new.task}; give this one a task_id of its own"
        )
