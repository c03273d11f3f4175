"""Calls in a caller's transaction that are written together with their neighbours, always in program order.

What was collected is written before the connection's next statement, savepoints included, and before its COMMIT; what
rolls back discards it. So nobody on the connection can tell it from a call that was written at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, NestedTransaction, TwoPhaseTransaction, event

from celery_durable.errors import EnqueueError
from celery_durable.store.operations import BATCH_BYTES, BATCH_ROWS, NewOperation
from celery_durable.store.sql import dialect_of, is_psycopg

Write: TypeAlias = Callable[[Connection, list[NewOperation]], None]

_ACTIVE, _INTRANS, _INERROR, _UNKNOWN = 1, 2, 3, 4
"""libpq's ``PQTRANS_ACTIVE``, and so on."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One call, and who writes it."""

    new: NewOperation
    service: object
    write: Write
    asynchronous: bool
    """It may have an ID that others know, and delays that count from now on."""
    made_s: float
    """Monotonic."""

    def since(self) -> NewOperation:
        """The operation with what is left of its delays."""
        names = ("eta_delay_ms", "expires_delay_ms")
        delays = {name: delay_ms for name in names if (delay_ms := getattr(self.new, name)) is not None}
        waited_ms = round((time.monotonic() - self.made_s) * 1000)
        left: dict[str, Any] = {name: max(0, delay_ms - waited_ms) for name, delay_ms in delays.items()}
        return replace(self.new, **left)


class Collected:
    """The calls of one connection that are not written yet.

    Made by the first call that can wait; it listens to its connection until :func:`finish`, or as long as the
    connection lives. It does not hold the connection, which holds it.
    """

    def __init__(self, connection: Connection) -> None:
        self._calls: list[_Call] = []
        self._bytes = 0
        self._listeners = (
            ("before_cursor_execute", self._before_statement),
            ("commit", self._before_commit),
            ("release_savepoint", self._before_release),
            ("rollback", self._rolled_back),
            ("rollback_savepoint", self._rolled_back),
        )
        for name, listener in self._listeners:
            event.listen(connection, name, listener)

    def stop(self, connection: Connection) -> None:
        """Listens no more. What was not written never will be."""
        for name, listener in self._listeners:
            event.remove(connection, name, listener)

    def add(self, connection: Connection, call: _Call) -> None:
        """Adds a call; where the batch is full, after writing those before it. An asynchronous one only waits."""
        if not call.asynchronous and (len(self._calls) >= BATCH_ROWS or self._bytes >= BATCH_BYTES):
            self.flush(connection)
        self._calls.append(call)
        self._bytes += len(call.new.body)

    def flush(self, connection: Connection) -> None:
        """Writes all or none. After an error they are still here, and written before what comes next, or never."""
        if not self._calls:
            return
        calls, size = self._calls, self._bytes
        self.discard()
        if _status(connection) == _INERROR:
            return  # nothing that came after the last savepoint can be kept
        try:
            # Its statements come back here, and find nothing. Where they are more than one, an exception that leaves
            # the transaction alive (SQLite's errors, a time limit's, a known ID with other arguments) could tear them.
            batches = list(_batches(calls))
            is_one_statement = is_psycopg(connection) and len(batches) == 1 and not calls[0].asynchronous
            with nullcontext() if is_one_statement else _savepoint(connection):
                for batch in batches:
                    batch[0].write(connection, [call.since() if call.asynchronous else call.new for call in batch])
        except BaseException:
            self._calls, self._bytes = calls + self._calls, size + self._bytes
            raise

    @property
    def waits(self) -> bool:
        """Whether there is a call that is not written yet."""
        return bool(self._calls)

    def discard(self) -> None:
        """Forgets them."""
        self._calls, self._bytes = [], 0

    def _before_statement(self, connection: Connection, *_: Any) -> None:
        self.flush(connection)

    def _before_release(self, connection: Connection, name: str, _context: object) -> None:
        try:
            self.flush(connection)
        except BaseException:
            # SQLAlchemy takes a RELEASE that fails for the end of the savepoint, and would not roll back to it.
            self.discard()
            with suppress(Exception):
                connection.engine.dialect.do_rollback_to_savepoint(connection, name)
            raise

    def _before_commit(self, connection: Connection) -> None:
        if self._calls and _status(connection) == _INERROR:
            count = len(self._calls)
            self.discard()
            raise EnqueueError(
                f"{count} calls of this transaction cannot be written, since a statement before them failed and its "
                "error was passed over: the server rolls all of it back; roll back, and do it again"
            )
        try:
            self.flush(connection)
        except BaseException:
            # A COMMIT that fails has ended the transaction. SQLAlchemy takes it for that, and would roll back no more.
            self.discard()
            with suppress(Exception):
                connection.connection.rollback()
            raise

    def _rolled_back(self, _connection: Connection, *_: Any) -> None:
        # All of it: what came before a savepoint was written before the savepoint.
        self.discard()


_of: WeakKeyDictionary[Connection, Collected] = WeakKeyDictionary()


def _batches(calls: list[_Call]) -> Iterator[list[_Call]]:
    """The calls in their order: each batch is of one service, and of one kind."""
    batch: list[_Call] = []
    size = 0
    for call in calls:
        differs = batch and (call.service is not batch[0].service or call.asynchronous != batch[0].asynchronous)
        if differs or len(batch) >= BATCH_ROWS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(call)
        size += len(call.new.body)
    yield batch


def collect(
    connection: Connection, service: object, new: NewOperation, write: Write, *, asynchronous: bool = False
) -> bool:
    """Adds a call. False: its transaction could end without a listener hearing of it, so insert it now.

    Such are autocommit, one that has failed or is not begun, two-phase commit, and drivers that do not say.

    :param write: writes calls of this service; must not hold the connection.
    :param asynchronous: nothing can be written now, so it may wait before the driver has begun; False tells that the
        transaction is over.
    """
    nested = connection.get_nested_transaction()
    if (
        not connection.in_transaction()
        or (nested is not None and not nested.is_active)
        or isinstance(connection.get_transaction(), TwoPhaseTransaction)
        or (not asynchronous and _status(connection) != _INTRANS)
    ):
        return False
    collected = _of.get(connection)
    if collected is None:
        collected = _of[connection] = Collected(connection)
    collected.add(connection, _Call(new, service, write, asynchronous, time.monotonic()))
    return True


def finish(connection: Connection, *, failing: bool) -> None:
    """Writes what was collected, if its transaction still takes statements, and listens no more.

    :param failing: an exception is on its way to the caller, and no other must take its place: what cannot be written
        now is left to the connection's next statement or COMMIT.
    """
    collected = _of.get(connection)
    if collected is None:
        return
    if collected.waits and _status(connection) == _INERROR:
        return  # nothing can be written: a rollback discards it, and a COMMIT tells (``_before_commit``)
    try:
        # What an asynchronous exception tore takes no statement. Where the transaction is over, nothing is left.
        if not connection.invalidated and _status(connection) not in (_ACTIVE, _UNKNOWN):
            collected.flush(connection)
    except Exception:
        if failing:
            return
        _stop(connection, collected)
        raise
    _stop(connection, collected)


def _stop(connection: Connection, collected: Collected) -> None:
    collected.stop(connection)
    del _of[connection]


def _savepoint(connection: Connection) -> NestedTransaction:
    if dialect_of(connection) == "sqlite" and _status(connection) != _INTRANS:
        connection.exec_driver_sql("BEGIN")  # pysqlite begins before a write: the savepoint's release would commit
    return connection.begin_nested()


def _status(connection: Connection) -> int | None:
    """How the driver sees the transaction, in libpq's numbers. None: it does not say."""
    if connection.closed or connection.invalidated:
        return None
    driver: Any = connection.connection.driver_connection
    status: int | None = getattr(getattr(driver, "info", None), "transaction_status", None)
    if status is None and getattr(driver, "in_transaction", False):  # sqlite3
        return _INTRANS
    return status
