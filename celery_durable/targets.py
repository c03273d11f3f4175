"""What :func:`celery_durable.using` takes, as the SQLAlchemy session or connection that statements go through.

A connection of Django's, psycopg's, psycopg2's or ``sqlite3``'s is borrowed: statements go through it, and it is left
as it was. It is neither committed, rolled back, reset nor closed; its own cursors, row factories and adapters stay.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from sqlalchemy import Connection, Engine, event, make_url
from sqlalchemy.orm import Session, SessionTransaction, scoped_session
from sqlalchemy.pool import StaticPool
from sqlalchemy.util import LRUCache

from celery_durable.errors import EnqueueError

_IDLE = 0
"""libpq's ``PQTRANS_IDLE``."""
_COMPILED_MAX = 200
"""Statements that a kind of borrowed connection keeps compiled."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """What statements go through."""

    target: Session | Connection
    borrowed: bool = False
    """SQLAlchemy hears of neither its other statements nor its end."""
    errors: AbstractContextManager[Any] = field(default_factory=nullcontext)
    """Inside it the driver's errors are raised as the borrowed connection's owner knows them."""


def accept(target: Any) -> Accepted:
    """A sync target of ``using``.

    :raises EnqueueError: it is none, or has no transaction open that an enqueue could be part of.
    """
    if isinstance(target, scoped_session):
        target = target()
    if isinstance(target, Session | Connection):
        return Accepted(target)
    if hasattr(target, "ensure_connection") and hasattr(target, "in_atomic_block"):
        return Accepted(_of_django(target), borrowed=True, errors=target.wrap_database_errors)
    borrowed = _of_driver(target)
    if borrowed is not None:
        return Accepted(borrowed, borrowed=True)
    kind = f"{type(target).__module__}.{type(target).__qualname__}"
    remedy = "give a SQLAlchemy Session or Connection, or a connection of Django's, psycopg's or sqlite3's"
    if isinstance(target, Engine):
        remedy = "an engine has no transaction: give a Connection (engine.begin()) or a Session"
    elif type(target).__name__ in {"AsyncSession", "AsyncConnection", "async_scoped_session"}:
        remedy = "write `async with`; or inside run_sync, give the sync Session or Connection that it passes"
    raise EnqueueError(f"using({kind}): {remedy}")


@dataclass(frozen=True, slots=True)
class Asynchronous:
    """An asynchronous target."""

    connection: Any
    """Its ``AsyncConnection``, in a transaction."""
    session: Session | None = None
    """The session that the ``AsyncSession`` stands for."""

    def enter(self) -> None:
        """Has each savepoint of the session's begin at once: what waits is either before it or inside it."""
        if self.session is not None:
            event.listen(self.session, "after_transaction_create", self._begin_savepoint)

    def leave(self) -> None:
        """Ends that."""
        if self.session is not None:
            event.remove(self.session, "after_transaction_create", self._begin_savepoint)

    def _begin_savepoint(self, session: Session, transaction: SessionTransaction) -> None:
        if transaction.nested:
            session.connection()


async def accept_async(target: object) -> Asynchronous | None:
    """An asynchronous target of ``using``; None: the target is no such.

    :raises EnqueueError: it is not connected yet.
    """
    asynchronous = sys.modules.get("sqlalchemy.ext.asyncio")  # whoever has a target of that kind has loaded it
    if asynchronous is None:
        return None
    if isinstance(target, asynchronous.async_scoped_session):
        target = target()
    if isinstance(target, asynchronous.AsyncSession):
        connection = await target.connection()
        _refuse_autocommit(connection.sync_connection)
        return Asynchronous(connection, target.sync_session)
    if not isinstance(target, asynchronous.AsyncConnection):
        return None
    if target.sync_connection is None:
        raise EnqueueError(
            "using(AsyncConnection): it is not connected yet: `async with engine.begin() as connection:`"
        )
    _refuse_autocommit(target.sync_connection)
    if not target.in_transaction():
        await target.begin()
    return Asynchronous(target)


def _refuse_autocommit(connection: Connection) -> None:
    chosen = connection.get_execution_options().get("isolation_level")
    if (chosen or getattr(connection.dialect, "_on_connect_isolation_level", None)) == "AUTOCOMMIT":
        raise EnqueueError("using(): the connection's isolation level is AUTOCOMMIT: give one with a transaction")


class _BorrowedConnection:
    """A driver's connection as SQLAlchemy's pool has it."""

    def __init__(self, raw: Any, cursor: Callable[[Any], Any], check: Callable[[], object]) -> None:
        self._raw = raw
        self._cursor = cursor
        self._check = check

    def cursor(self) -> Any:
        """A cursor whose rows are tuples, and whose values are as SQLAlchemy expects them.

        :raises EnqueueError: the transaction that was there is over.
        """
        self._check()
        return self._cursor(self._raw)

    def commit(self) -> None:
        """Does nothing: its owner commits."""

    def rollback(self) -> None:
        """Does nothing: its owner rolls back."""

    def close(self) -> None:
        """Does nothing: its owner closes it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


def _of_driver(target: Any, check: Callable[[], object] | None = None) -> Connection | None:
    # By names: who has such a connection has loaded its module, and nobody else need have it.
    if isinstance(target, sqlite3.Connection):
        return _borrow("sqlite", sqlite3, target, _sqlite_cursor, check or partial(_check_sqlite, target))
    psycopg, psycopg2 = sys.modules.get("psycopg"), sys.modules.get("psycopg2")
    if psycopg is not None and isinstance(target, psycopg.Connection):
        own = partial(_check_postgresql, target, "psycopg.Connection", "with connection.transaction():")
        return _borrow("postgresql+psycopg", psycopg, target, _psycopg_cursor, check or own)
    if psycopg2 is not None and isinstance(target, psycopg2.extensions.connection):
        own = partial(_check_postgresql, target, "psycopg2's connection", "connection.autocommit = False")
        return _borrow("postgresql+psycopg2", psycopg2, target, _psycopg2_cursor, check or own)
    return None


def _check_sqlite(connection: Any) -> None:
    commits_itself = connection.isolation_level is None or getattr(connection, "autocommit", None) is True  # 3.12
    if commits_itself and not connection.in_transaction:
        raise _autocommit("sqlite3.Connection", 'connection.execute("BEGIN")')


def _check_postgresql(connection: Any, kind: str, remedy: str) -> None:
    if connection.autocommit and connection.info.transaction_status == _IDLE:
        raise _autocommit(kind, remedy)


def _check_django(connection: Any) -> None:
    if not connection.in_atomic_block and connection.get_autocommit():
        raise _autocommit(f"Django's connection {connection.alias!r}", "with transaction.atomic():")
    connection.validate_no_broken_transaction()


def _of_django(target: Any) -> Connection:
    _check_django(target)
    target.ensure_connection()
    if target.vendor not in {"postgresql", "sqlite"}:
        raise EnqueueError(
            f"using(Django's connection {target.alias!r}): it leads to {target.vendor}; operations are kept in "
            "postgresql or sqlite: give the connection of this service's own database"
        )
    found = _of_driver(target.connection, partial(_check_django, target))
    if found is None:
        driver = f"{type(target.connection).__module__}.{type(target.connection).__qualname__}"
        raise EnqueueError(
            f"using(Django's connection {target.alias!r}): its driver's connection, {driver}, is none of psycopg's, "
            "psycopg2's or sqlite3's"
        )
    return found


def _autocommit(kind: str, remedy: str) -> EnqueueError:
    return EnqueueError(
        f"using({kind}): it is in autocommit and has no transaction open, so each statement would be committed by "
        f"itself; begin one first: {remedy}"
    )


def _borrow(url: str, dbapi: Any, raw: Any, cursor: Callable[[Any], Any], check: Callable[[], object]) -> Connection:
    check()
    dialect, compiled = _dialect_and_cache(url, dbapi)
    pool = StaticPool(lambda: _BorrowedConnection(raw, cursor, check), reset_on_return=None, dialect=dialect)
    return Engine(pool, dialect, make_url(f"{url}://")).connect().execution_options(compiled_cache=compiled)


@cache
def _dialect_and_cache(url: str, dbapi: Any) -> tuple[Any, Any]:
    """Its dialect, and what was compiled for it, the same for all connections of the kind."""
    parsed: Any = make_url(f"{url}://")
    return parsed.get_dialect()(dbapi=dbapi), LRUCache(_COMPILED_MAX)


def _sqlite_cursor(raw: sqlite3.Connection) -> sqlite3.Cursor:
    cursor = raw.cursor(sqlite3.Cursor)
    cursor.row_factory = None
    return cursor


def _psycopg_cursor(raw: Any) -> Any:
    import psycopg
    from psycopg.types.json import JsonBinaryLoader, JsonLoader

    cursor = psycopg.Cursor(raw, row_factory=psycopg.rows.tuple_row)
    for loader in (JsonLoader, JsonBinaryLoader):
        cursor.adapters.register_loader("json", loader)
    return cursor


def _psycopg2_cursor(raw: Any) -> Any:
    import psycopg2.extensions
    import psycopg2.extras

    cursor = raw.cursor(cursor_factory=psycopg2.extensions.cursor)
    psycopg2.extras.register_default_json(cursor, loads=json.loads)
    return cursor
