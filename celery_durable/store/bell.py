"""Rings a service's dispatchers when a commit gave them something to do: a hint that saves them a pause.

PostgreSQL's ``NOTIFY`` takes a lock of the whole database until its transaction has ended. So it is never part of a
transaction that does anything else: it rings after the commit, waits for no disk, and at most every
:data:`RING_EVERY_S` seconds for each kind of work in a process, since a dispatcher that was rung looks often for
longer than that. What no ring tells is found by the poll (design, section 7: wake-ups are hints). SQLite has no such
thing.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, Literal, get_args

from sqlalchemy.exc import SQLAlchemyError

from celery_durable.store.database import Database
from celery_durable.store.schema import Tables
from celery_durable.store.sql import NOT_WAITING_FOR_DISK

Work = Literal["passes", "delivery"]
"""What the commit made: wakes of accounts, or operations to be sent to Celery."""
RING_EVERY_S = 0.02
WAIT_S = 1.0
"""How long :meth:`Listener.wait` waits at most: a loop that is told to end does so within this."""
_NAME_BYTES_MAX = 63
_RING = f"SELECT {NOT_WAITING_FOR_DISK}, pg_notify(%s, %s)"


def _channel(tables: Tables) -> str:
    """One for each client of a database."""
    name = f"{tables.metadata.schema or ''}.{tables.prefix}bell"
    return name.encode()[-_NAME_BYTES_MAX:].decode(errors="ignore")


class Bell:
    """One client's bell, for all threads of one process. On SQLite it is silent."""

    def __init__(self, database: Database, tables: Tables) -> None:
        self._database = database
        self._channel = _channel(tables)
        self._silent_until_s: dict[Work, float] = {}

    def ring(self, work: Work, *, held: bool = False) -> None:
        """Rings, after a commit. The database fails it in silence; it waits for no disk.

        :param held: on the thread's held connection, for a thread that has one anyway.
        """
        database, now_s = self._database, time.monotonic()
        if database.dialect == "sqlite" or now_s < self._silent_until_s.get(work, 0.0):
            return
        self._silent_until_s[work] = now_s + RING_EVERY_S
        with suppress(SQLAlchemyError), database.autocommit() if held else database.reading() as connection:
            connection.exec_driver_sql(_RING, (self._channel, work))


class Listener:
    """Waits for the bell, in one thread, on a connection of its own."""

    def __init__(self, database: Database, tables: Tables) -> None:
        self._database = database
        self._channel = _channel(tables)
        self._listens_on: Any = None

    def wait(self) -> frozenset[Work]:
        """Waits for the bell for at most :data:`WAIT_S` seconds. Returns what it rang for, or may have while nobody
        listened."""
        with self._database.autocommit() as connection:
            driver: Any = connection.connection.driver_connection
            if driver is not self._listens_on:
                driver.execute(f"LISTEN {connection.dialect.identifier_preparer.quote_identifier(self._channel)}")
                self._listens_on = driver
                return frozenset(get_args(Work))
            return frozenset(notice.payload for notice in driver.notifies(timeout=WAIT_S, stop_after=1))
