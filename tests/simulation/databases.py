"""SQLite databases in memory, each behind one connection that lives as long as the test process.

A seed begins by loading the migrated template into each of them, which takes microseconds; so do a backup, its
restoration and a copy. The engines stay, and with them every statement that SQLAlchemy has compiled.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.pool import StaticPool

from celery_durable.store.database import Database
from celery_durable.store.migrate import CLIENT, Migrations, TableSet, migrate
from celery_durable.store.schema import Tables, build_tables
from holder_service import store as holder_store
from holder_service.migrations import HOLDER
from holder_service.store import HolderTables
from tests.simulation.clock import sql_now_ms
from tests.simulation.statements import Prepared, QuickConnection


@cache
def client_tables() -> Tables:
    """The tables of every service."""
    return build_tables()


@cache
def holder_tables() -> HolderTables:
    """The tables of every holder."""
    return holder_store.build_tables()


class Slot:
    """One database. What a process has open to it are :class:`SimulatedDatabase` objects."""

    def __init__(self, tables: TableSet, migrations: Migrations) -> None:
        self.raw = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False, cached_statements=1_024)
        self.skew_ms = 0
        """How much its clock is ahead of virtual time."""
        self.raw.create_function("simulated_now_ms", 0, lambda: sql_now_ms() + self.skew_ms)
        self.engine = create_engine(
            "sqlite://",
            creator=lambda: self.raw,
            poolclass=StaticPool,
            pool_reset_on_return=None,
            query_cache_size=2_000,
        )
        # One connection for all that production code opens: none of them may change how it begins transactions.
        self.engine.dialect.set_isolation_level = lambda *_: None  # type: ignore[method-assign]
        self.engine.dialect.do_savepoint = lambda _, name: self.raw.execute(f"SAVEPOINT {name}")  # type: ignore[method-assign]
        self.engine.dialect.do_release_savepoint = lambda _, name: self.raw.execute(f"RELEASE SAVEPOINT {name}")  # type: ignore[method-assign]
        self.before_begin: Callable[[], None] = lambda: None
        # Not a listener: with one, SQLAlchemy goes through all its events at each statement.
        self.autocommit_engine = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        for engine in (self.engine, self.autocommit_engine):
            engine._connection_cls = self._connection_class()  # type: ignore[misc]
        self._tables, self._migrations = tables, migrations
        migrate(SimulatedDatabase(self), tables, to=migrations.revisions[0], migrations=migrations)
        self._oldest = self.raw.serialize()
        self.migrate()
        self.template = self.raw.serialize()

    def load_oldest(self) -> None:
        """Replaces everything by the empty tables of the first revision."""
        self.load(self._oldest)

    def migrate(self) -> None:
        """Brings the tables up to date."""
        migrate(SimulatedDatabase(self), self._tables, migrations=self._migrations)

    def load(self, content: bytes | None = None) -> None:
        """Replaces everything by a backup, or by the empty template."""
        if self.raw.in_transaction:
            self.raw.rollback()
        self.raw.deserialize(self.template if content is None else content)

    def backup(self) -> bytes:
        """All that is committed."""
        return self.raw.serialize()

    def rows(self, sql: str, *parameters: Any) -> list[Any]:
        """Reads past SQLAlchemy: for the simulator's own checks."""
        return self.raw.execute(sql, parameters).fetchall()

    def _connection_class(self) -> type[Connection]:
        slot = self

        class SlotConnection(QuickConnection):
            raw = slot.raw
            prepared: ClassVar[WeakKeyDictionary[Any, dict[tuple[str, ...], Prepared]]] = WeakKeyDictionary()

            def _begin_impl(self, transaction: Any) -> None:
                slot.before_begin()
                super()._begin_impl(transaction)
                if self.get_execution_options().get("isolation_level") != "AUTOCOMMIT":
                    slot.raw.execute("BEGIN IMMEDIATE")

        return SlotConnection


class SimulatedDatabase(Database):
    """A process's access to a slot."""

    def __init__(self, slot: Slot) -> None:
        super().__init__("sqlite:///simulated.sqlite3")
        self._slot = slot

    @property
    def engine(self) -> Engine:
        """The slot's engine."""
        return self._slot.engine

    @property
    def autocommit_engine(self) -> Engine:
        """The slot's."""
        return self._slot.autocommit_engine

    def held(self) -> Connection:
        """The held connection; a crash or an outage reaches it too."""
        self._slot.before_begin()
        return super().held()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """The held connection: it reads as any in autocommit does, and is there already."""
        yield self.held()

    def drop_held(self) -> None:
        """Forgets the held connection; the one below it is everybody's."""
        connection: Connection | None = getattr(self._held, "connection", None)
        if connection is not None:
            self._held.connection = None
            connection.close()

    def dispose(self) -> None:
        """As :meth:`drop_held`."""
        self.drop_held()


@cache
def client_slot(number: int) -> Slot:
    """The database of the service with this number."""
    return Slot(client_tables(), CLIENT)


@cache
def holder_slot() -> Slot:
    """The holder's database."""
    return Slot(holder_tables(), HOLDER)
