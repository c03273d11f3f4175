"""One database: its engine, its transactions and the one held connection of a process's hot path.

Nothing crosses a fork: a process that finds itself forked drops what it inherited, without closing the parent's
sockets, and connects anew (case C18).
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError
from sqlalchemy.pool import QueuePool

from celery_durable.crashpoints import crashpoint
from celery_durable.errors import ConfigurationError
from celery_durable.store.sql import DIALECTS

SQLITE_BUSY_TIMEOUT_MS = 10_000
STANDSTILL_MIN_MS = 5_000
"""A transaction may stand still this long at least: a large batch takes its time between two statements."""
_POSTGRESQL_CONNECTION = {
    "application_name": "celery-durable",
    "connect_timeout": 10,
    # A server that vanished without a word: asked after 10 s of silence, given up after 20 s.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 2,
    "tcp_user_timeout": 20_000,
}
"""What libpq is told unless the URL says otherwise."""


_DRIVERS = ("postgresql", "postgresql+psycopg", "sqlite", "sqlite+pysqlite")
_SECRET = re.compile("pass|secret|token|key", re.IGNORECASE)
_IDLE = 0
"""libpq's ``PQTRANS_IDLE``."""
_NO_URL = "(not a database URL)"
_SQLITE_NO_DATABASE = "file is not a database"
_SQLITE_FILE_ERRORS = (_SQLITE_NO_DATABASE, "unable to open database file", "attempt to write a readonly database")


def redact(url: str | URL) -> str:
    """The URL as messages may show it: its passwords, in its options too, replaced by ``***``."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # ValueError: a port that is no number
        return _NO_URL
    secrets = {name: "***" for name in parsed.query if _SECRET.search(name)}
    return parsed.update_query_dict(secrets).render_as_string(hide_password=True).replace("%2A", "*")


def file_problem(url: URL, error: BaseException) -> str | None:
    """What keeps SQLite from using its file, and the remedy; None: the error is about something else."""
    if url.get_backend_name() != "sqlite" or not str(error).startswith(_SQLITE_FILE_ERRORS):
        return None
    path = Path(str(url.database)).absolute()
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}: make it, or correct the path"
    if path.is_dir():
        return f"{path} is a folder: name a file in it"
    if path.exists() and str(error).startswith(_SQLITE_NO_DATABASE):
        return f"{path} is no SQLite database: move it away, or name another file"
    return f"{path} cannot be opened ({error}): let this process's user write to it and to its folder, or name another"


def _parse(url: str, field: str) -> URL:
    if "\0" in url:
        raise ConfigurationError(f"{field} = {_NO_URL}: it holds a NUL; use sqlite:///file or postgresql+psycopg://…")
    try:
        parsed = make_url(url)
        dialect = parsed.get_backend_name()
    except (ArgumentError, ValueError):
        raise ConfigurationError(
            f"{field} = {_NO_URL}: use postgresql+psycopg://user:password@host:port/name, with any @ : / ? in the "
            "password written as %40 %3A %2F %3F, or sqlite:///file"
        ) from None
    if dialect not in DIALECTS:
        raise ConfigurationError(f"{field} = {redact(parsed)}: {dialect} is not supported; use postgresql or sqlite")
    if parsed.drivername not in _DRIVERS:
        raise ConfigurationError(
            f"{field} = {redact(parsed)}: the driver {parsed.drivername} is not supported; use postgresql+psycopg or "
            "sqlite"
        )
    if dialect == "sqlite" and parsed.database in {None, "", ":memory:"}:
        raise ConfigurationError(
            f"{field} = {redact(parsed)}: a database in memory is lost with its connection; name a file: sqlite:///file"
        )
    return parsed.set(drivername="postgresql+psycopg") if parsed.drivername == "postgresql" else parsed


class Database:
    """A service's or a holder's SQL database.

    :param url: an SQLAlchemy URL, ``postgresql+psycopg://…`` or ``sqlite:///…``.
    :param schema: PostgreSQL schema of the tables, or None for the connection's own.
    :param pool_size: connections at most kept open by this process for transactions, and as many for single statements.
    :raises ConfigurationError: the URL is no URL, or names a database that is not supported.
    """

    def __init__(self, url: str, *, schema: str | None = None, pool_size: int = 5, field: str = "database_url") -> None:
        parsed = _parse(url, field)
        dialect = parsed.get_backend_name()
        if dialect == "sqlite" and schema is not None:
            raise ConfigurationError(f"database_schema = {schema!r}: SQLite has no schemas; use table_prefix")
        self.url = parsed
        self.dialect: Literal["postgresql", "sqlite"] = "postgresql" if dialect == "postgresql" else "sqlite"
        self.schema = schema
        self._field = field
        self._pool_size = pool_size
        self._standstill_ms: int | None = None
        self._pid = os.getpid()
        self._engines: tuple[Engine, Engine] | None = None
        self._held = threading.local()
        self._lock = threading.Lock()

    @property
    def engine(self) -> Engine:
        """This process's engine, made on first use and again after a fork."""
        return self._both()[0]

    @property
    def autocommit_engine(self) -> Engine:
        """The same with each statement a transaction of its own. On PostgreSQL it has connections of its own: to have
        them change their isolation level, and be reset, takes longer than a short statement."""
        return self._both()[1]

    def _both(self) -> tuple[Engine, Engine]:
        if self._engines is not None and self._pid == os.getpid():
            return self._engines
        with self._lock:
            self._after_fork()
            if self._engines is None:
                self._engines = self._create()
            return self._engines

    def _after_fork(self) -> None:
        if self._pid == os.getpid():
            return
        for engine in self._engines or ():
            engine.dispose(close=False)
        self._engines = None
        self._held = threading.local()
        self._pid = os.getpid()

    def _create(self) -> tuple[Engine, Engine]:
        options: dict[str, Any] = {"poolclass": QueuePool, "pool_size": self._pool_size, "max_overflow": 10}
        if self.dialect == "postgresql":
            options["isolation_level"] = "READ COMMITTED"
            options["connect_args"] = self._postgresql_connection()
        else:
            options["connect_args"] = {"timeout": SQLITE_BUSY_TIMEOUT_MS / 1000, "check_same_thread": False}
        try:
            engine = create_engine(self.url, **options)
            if self.dialect == "postgresql":
                options |= {"isolation_level": "AUTOCOMMIT", "pool_reset_on_return": None}
                autocommit = create_engine(self.url, **options)
                event.listen(autocommit, "checkin", _close_if_not_idle)
                return engine, autocommit
        except (NoSuchModuleError, ModuleNotFoundError) as error:
            raise ConfigurationError(
                f"{self._field} = {redact(self.url)}: its driver is not installed ({error}); "
                "install celery-durable[postgresql]"
            ) from None
        _prepare_sqlite(engine)
        return engine, engine.execution_options(isolation_level="AUTOCOMMIT")

    def end_standstills(self, after_ms: int) -> None:
        """Has PostgreSQL end a transaction of ours that stands still: a frozen process must not keep its locks.

        For a process that shares its rows with others; to be called before its threads start. SQLite cannot.

        :param after_ms: how long it may stand still, at least :data:`STANDSTILL_MIN_MS`.
        """
        self._standstill_ms = max(STANDSTILL_MIN_MS, after_ms)
        self.dispose()

    def _postgresql_connection(self) -> dict[str, Any]:
        query = self.url.query
        arguments: dict[str, Any] = {name: value for name, value in _POSTGRESQL_CONNECTION.items() if name not in query}
        if self._standstill_ms is not None:
            # In front, so that what the operator set wins. libpq reads its variable only where no options are given.
            given = query.get("options", os.environ.get("PGOPTIONS", ""))
            option = f"-c idle_in_transaction_session_timeout={self._standstill_ms}"
            arguments["options"] = " ".join([option, *([given] if isinstance(given, str) else given)]).strip()
        return arguments

    @contextmanager
    def transaction(self, place: str | None = None) -> Iterator[Connection]:
        """One transaction: committed at the end, rolled back by an exception. On SQLite it takes the write lock.

        :param place: names the crash points before and after its commit.
        """
        with self.engine.begin() as connection:
            yield connection
            if place is not None:
                crashpoint(place, "before_commit")
        if place is not None:
            crashpoint(place, "after_commit")

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection for reads only, one snapshot a statement; on SQLite it takes no write lock."""
        with self.autocommit_engine.connect() as connection:
            yield connection

    @contextmanager
    def one_write(self, place: str) -> Iterator[Connection]:
        """A connection for a statement that writes, or some that stand each alone, in autocommit: without the trips of
        BEGIN and COMMIT.

        :param place: names the crash points before and after it.
        """
        with self.reading() as connection:
            crashpoint(place, "before_commit")
            yield connection
            crashpoint(place, "after_commit")

    @contextmanager
    def driver_write(self, place: str) -> Iterator[Any]:
        """As :meth:`one_write`, on psycopg's own connection, whose errors are :attr:`driver_error`. For PostgreSQL.

        :param place: names the crash points before and after it.
        """
        pooled = self.autocommit_engine.raw_connection()
        try:
            crashpoint(place, "before_commit")
            yield pooled.driver_connection
            crashpoint(place, "after_commit")
        finally:
            pooled.close()

    @property
    def driver_error(self) -> type[Exception]:
        """What the driver raises by itself, where SQLAlchemy has no part in it."""
        error: type[Exception] = self.engine.dialect.loaded_dbapi.Error
        return error

    def held(self) -> Connection:
        """The calling thread's own connection, kept open, in autocommit: each statement is its own transaction.

        For a worker's start, heartbeat and settle. After an error, call :meth:`drop_held`; the next call connects
        anew. Not for use inside :meth:`transaction`.
        """
        engine = self.autocommit_engine
        connection: Connection | None = getattr(self._held, "connection", None)
        if connection is None or connection.closed:
            connection = engine.connect()
            self._held.connection = connection
        return connection

    @contextmanager
    def autocommit(self) -> Iterator[Connection]:
        """The held connection, dropped after an error. For what a loop asks again and again."""
        try:
            yield self.held()
        except Exception:
            self.drop_held()
            raise

    def drop_held(self) -> None:
        """Closes the calling thread's held connection, for example after an error on it."""
        connection: Connection | None = getattr(self._held, "connection", None)
        if connection is not None:
            self._held.connection = None
            connection.invalidate()
            connection.close()

    def dispose(self) -> None:
        """Closes this process's connections: those that other threads still use, once these let go of them."""
        self.drop_held()
        engines, self._engines = self._engines, None
        if engines is not None and self._pid == os.getpid():
            for engine in engines:
                event.listen(engine.pool, "checkin", _close_at_once)
                engine.dispose()


def _close_at_once(_dbapi: Any, record: Any) -> None:
    # The pool that it goes back to is no more in use: nobody else would ever close it.
    record.invalidate()


def _close_if_not_idle(dbapi: Any, record: Any) -> None:
    # An asynchronous exception (a soft time limit) tore a statement: psycopg would refuse the next one on it for ever.
    if dbapi is not None and dbapi.info.transaction_status != _IDLE:
        record.invalidate()


def _prepare_sqlite(engine: Engine) -> None:
    # SQLAlchemy's pysqlite default begins a deferred transaction lazily: two writers that both read first would
    # fail with "database is locked" at once. BEGIN IMMEDIATE makes the second one wait for busy_timeout instead.
    @event.listens_for(engine, "connect")
    def _connect(dbapi: Any, _record: Any) -> None:
        dbapi.isolation_level = None
        cursor = dbapi.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=NORMAL")
        cursor.execute(f"PRAGMA busy_timeout={SQLITE_BUSY_TIMEOUT_MS}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        if connection.get_execution_options().get("isolation_level") != "AUTOCOMMIT":
            connection.exec_driver_sql("BEGIN IMMEDIATE")
