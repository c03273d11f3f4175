"""The transactions that writes for a caller go through: those of :mod:`celery_durable.scope`, else ones of our own."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Engine, select
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

from celery_durable import collected, scope
from celery_durable.errors import ConfigurationError, EnqueueError
from celery_durable.store.database import file_problem, redact
from celery_durable.store.operations import NewOperation, statements
from celery_durable.store.sql import DIALECTS

if TYPE_CHECKING:
    from celery_durable.runtime import Runtime

_checked: weakref.WeakKeyDictionary[Engine, dict[tuple[str, str | None, str], float]] = weakref.WeakKeyDictionary()
"""Engines whose database was found not to be another service's: until when that is believed (monotonic), by (prefix,
schema, client_id)."""
NOBODYS_S = 1.0
"""So long a database that no dispatcher has claimed yet is taken for this service's."""


@contextmanager
def transaction(runtime: Runtime, place: str) -> Iterator[Connection]:
    """The caller's connection where :func:`using` is in force, else a transaction of our own, committed at the end.

    :param place: names the crash points of our own.
    :raises EnqueueError: the caller's session or connection cannot be used for this service's tables.
    :raises ConfigurationError: the settings lead to another service's tables, or to none.
    """
    target = scope.target_in_force()
    with database_errors(runtime, target):
        if target is None:
            with runtime.database.transaction(place) as connection:
                require_own(runtime, connection)
                yield connection
        else:
            yield _connection(runtime, target)


def collect(runtime: Runtime, connection: Connection, new: NewOperation) -> bool:
    """Leaves the operation, whose ID nobody else has, to be written together with its neighbours; see :func:`using`.

    False: it is to be inserted now. So is the first of a block: it tells what is wrong with the tables, and a block
    with one call pays nothing for the collecting.
    """
    use = scope.in_force()
    if use is None or use.borrowed or new.eta_delay_ms is not None or new.expires_delay_ms is not None:
        return False  # a delay counts from the call on
    if connection not in use.connections:
        use.connections.add(connection)
        return False
    return collected.collect(connection, runtime, new, partial(_write, runtime, weakref.ref(use.target)))


def defer(runtime: Runtime, new: NewOperation) -> None:
    """Leaves the operation to be written before the asynchronous connection's next statement, or as its block ends.

    :raises EnqueueError: its transaction is over.
    """
    connection: Any = scope.target_in_force()
    write = partial(_write_deferred, runtime)
    if not collected.collect(connection, runtime, new, write, asynchronous=True):
        raise EnqueueError("using(): its transaction is over; enter `async with using(…)` for each transaction")


def _write(
    runtime: Runtime, target: weakref.ref[Session | Connection], connection: Connection, batch: list[NewOperation]
) -> None:
    with database_errors(runtime, target() or connection):
        statements(connection, runtime.tables).insert_many(connection, batch)


def _write_deferred(runtime: Runtime, connection: Connection, batch: list[NewOperation]) -> None:
    with database_errors(runtime, connection):
        _require_right(runtime, connection)
        statements(connection, runtime.tables).insert_many(connection, batch)


@contextmanager
def reading(runtime: Runtime) -> Iterator[Connection]:
    """A connection to read with: the caller's where there is one, since only that sees what is not committed yet.

    :raises EnqueueError: as :func:`transaction`.
    """
    target = scope.target_in_force()
    if target is not None:
        with database_errors(runtime, target):
            yield _connection(runtime, target)
    else:
        with database_errors(runtime), runtime.database.reading() as connection:
            yield connection


def _connection(runtime: Runtime, target: Session | Connection) -> Connection:
    if scope.must_wait():
        raise EnqueueError(
            f"using({_name(target)}): this needs the database's answer at once, which only code inside "
            "`await session.run_sync(…)` can wait for"
        )
    connection = target if isinstance(target, Connection) else target.connection()
    _require_right(runtime, connection)
    return connection


def _require_right(runtime: Runtime, connection: Connection) -> None:
    """Refuses a caller's connection to another kind of database, or to another service's."""
    if connection.dialect.name not in DIALECTS:
        raise EnqueueError(
            f"using({_name(connection)}): operations are kept in {' or '.join(DIALECTS)}; give a session on this "
            f"service's own database, {redact(runtime.database.url)}"
        )
    owner = _other_owner(runtime, connection, once=False)
    if owner is not None:
        raise EnqueueError(
            f"using({_name(connection)}): its database belongs to client_id {owner!r}, this service is "
            f"{runtime.settings.client_id!r}; give a session on this service's own database"
        )


def is_own(runtime: Runtime) -> bool:
    """Whether :func:`require_own` has passed in this process for single statements: it will not look again."""
    return _key(runtime) in _checked.get(runtime.database.autocommit_engine, {})


def require_own(runtime: Runtime, connection: Connection) -> None:
    """Refuses settings that lead to another service's tables. Looks once in a process.

    :raises ConfigurationError: they do.
    """
    owner = _other_owner(runtime, connection, once=True)
    if owner is not None:
        raise ConfigurationError(
            f"client_id = {runtime.settings.client_id!r}: the database {redact(runtime.database.url)} belongs to "
            f"client_id {owner!r}; give this service a database, a database_schema or a table_prefix of its own"
        )


def _other_owner(runtime: Runtime, connection: Connection, *, once: bool) -> str | None:
    """The ``client_id`` of another service whose tables these are: its dispatcher would hand our operations to its
    workers. None: they are this service's own, or nobody's yet."""
    settings, client = runtime.settings, runtime.tables.client
    key = _key(runtime)
    seen = _checked.setdefault(connection.engine, {})
    if seen.get(key, 0.0) > time.monotonic():
        return None
    owners: list[str] = list(connection.scalars(select(client.c.client_id)))
    if owners and settings.client_id not in owners:
        return owners[0]
    seen[key] = float("inf") if owners or once else time.monotonic() + NOBODYS_S
    return None


def _key(runtime: Runtime) -> tuple[str, str | None, str]:
    settings = runtime.settings
    return settings.table_prefix, settings.database_schema, settings.client_id


@contextmanager
def database_errors(runtime: Runtime, target: Session | Connection | None = None) -> Iterator[None]:
    """Turns what SQLAlchemy says about missing tables or an unusable session into one clear line.

    So it does with an SQLite file that cannot be used. Errors of the database itself (away, locked, a conflict of
    transactions) pass as they are: the caller knows how to handle those of its own database.
    """
    try:
        yield
    except DBAPIError as error:
        if target is None and error.orig is not None:
            found = file_problem(runtime.database.url, error.orig)
            if found is not None:
                raise ConfigurationError(f"database_url = {redact(runtime.database.url)}: {found}") from error
        if not _is_missing(error):
            use = scope.in_force()
            if target is None or use is None or not use.borrowed or error.orig is None:
                raise
            with use.errors:
                raise error.orig from error
        missing = (
            f"its tables {runtime.tables.operations.fullname}, … are missing or not up to date ({_first_line(error)})"
        )
        if target is None:
            raise ConfigurationError(
                f"database_url = {redact(runtime.database.url)}: {missing}; run: celery -A <app> durable migrate"
            ) from error
        raise EnqueueError(
            f"using({_name(target)}): {missing}; give a session on this service's own database, "
            f"{redact(runtime.database.url)}"
        ) from error
    except SQLAlchemyError as error:
        if target is None:
            raise
        raise EnqueueError(f"using({_name(target)}): it cannot be used: {_first_line(error)}") from error


def _is_missing(error: DBAPIError) -> bool:
    # PostgreSQL: undefined table, column, schema. SQLite has no codes for these.
    if _sqlstate(error.orig) in {"42P01", "42703", "3F000"}:
        return True
    return (
        str(error.orig).startswith(("no such table", "no such column", "table "))
        and "sqlite" in type(error.orig).__module__
    )


def _sqlstate(error: Any) -> Any:
    """PostgreSQL's code of an error, by whichever driver a caller's session has: psycopg, psycopg2 or pg8000."""
    fields = error.args[0] if error.args and isinstance(error.args[0], dict) else {}
    return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None) or fields.get("C")


def _name(target: Session | Connection) -> str:
    kind = type(target).__name__
    try:
        bind = target.engine if isinstance(target, Connection) else target.get_bind()
        engine = bind.engine if isinstance(bind, Connection) else bind
        return f"{kind} on {redact(engine.url)}"
    except SQLAlchemyError:
        return kind


def _first_line(error: Exception) -> str:
    return str(getattr(error, "orig", None) or error).strip().split("\n", 1)[0]
