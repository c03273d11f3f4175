"""A holder process: the service's loop and the relay's, until it is told to end."""

from __future__ import annotations

import logging
import threading

from celery_durable.kafka.relay import Relay
from celery_durable.scheduling.loop import Loop, quick_turns, stop_all
from celery_durable.scheduling.signals import signals_set
from celery_durable.store.database import Database
from celery_durable.store.migrate import check
from holder_service import store
from holder_service.migrations import HOLDER
from holder_service.service import Service
from holder_service.settings import HolderSettings
from holder_service.store import HolderTables

logger = logging.getLogger(__name__)

PAUSE_MIN_S = 0.005
RELAY_PAUSE_MAX_S = 5.0
"""A commit wakes the relay, and so do new partitions; its polls only find what another holder left behind."""
NOT_IN_SERVICE_S = 0.25


class Holder:
    """The loops of one holder instance. Several on one database and topic share the partitions."""

    def __init__(self, database: Database, tables: HolderTables, settings: HolderSettings) -> None:
        self._settings = settings
        self._relay = Relay(database, tables.outbox, settings, batch_max=settings.relay_batch_max)
        pause_max_s = settings.poll_max_ms / 1000
        self._relay_loop = Loop("relay", self._relay_step, pause_min_s=PAUSE_MIN_S, pause_max_s=RELAY_PAUSE_MAX_S)
        self._service_loop = Loop("service", self._service_step, pause_min_s=PAUSE_MIN_S, pause_max_s=pause_max_s)
        self._service = Service(
            database,
            tables,
            settings,
            wake_relay=self._relay_loop.wake,
            stopping=lambda: self._service_loop.stopping,
        )

    def start(self) -> None:
        """Starts the threads."""
        self._service_loop.start()
        self._relay_loop.start()

    def stop(self) -> None:
        """Ends the threads within ``settings.shutdown_s`` and leaves the group.

        What is in the middle of a transaction then is rolled back when the process ends, and done again by another.
        """
        late = stop_all([self._service_loop, self._relay_loop], self._settings.shutdown_s)
        for name in late:
            logger.warning("%s did not end within shutdown_s = %g: left behind", name, self._settings.shutdown_s)
        if self._service_loop.name not in late:
            self._service.close()
        if self._relay_loop.name not in late:
            self._relay.close()

    def _service_step(self) -> float | None:
        return self._service.step()

    def _relay_step(self) -> float | None:
        # What a rebuild stages is sent when it is complete: until then it has not seen every client.
        return self._relay.step() if self._service.may_send else NOT_IN_SERVICE_S


def run(settings: HolderSettings, *, stop: threading.Event | None = None) -> int:
    """Runs a holder in the foreground until SIGTERM, SIGINT or ``stop``. Returns the process's exit code.

    :raises ConfigurationError: a setting or the database's schema is wrong.
    """
    database = open_database(settings)
    tables = store.build_tables(settings.table_prefix, settings.database_schema)
    check(database, tables, HOLDER)
    ended = stop or threading.Event()
    with signals_set(ended), quick_turns():
        holder = Holder(database, tables, settings)
        holder.start()
        logger.info("holder started: group %s, topic %s", settings.group_id, settings.accounts_topic)
        ended.wait()
        logger.info("holder ends")
        holder.stop()
        database.dispose()
    return 0


def open_database(settings: HolderSettings) -> Database:
    """The holder's database. Raises :class:`ConfigurationError` naming what is wrong with its URL.

    On PostgreSQL the server ends a transaction that stands still for as long as it takes to lose one's partitions.
    """
    url = settings.database_url.get_secret_value()
    database = Database(url, schema=settings.database_schema, pool_size=settings.database_pool_size)
    database.end_standstills(settings.kafka_session_timeout_ms)
    return database
