"""How a holder comes into service: first start, rebuild from the topic, or the operator's word (design, section 8).

A rebuild reads the limits topic, then every partition of the accounts topic from its start to the end that it had at
that moment, in a new epoch. Nothing is sent before it is complete, and nothing is given in an account before every
client seen there has acknowledged the epoch (``semaphore.rebuilding_account``, ``semaphore.new_epoch``).
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from celery_durable.kafka.received import read_to_end
from celery_durable.permits.messages import AccountReport, LimitMirror, read_limit_mirror
from celery_durable.store import counters, offsets, outbox
from celery_durable.store.database import Database
from celery_durable.store.offsets import Position
from holder_service import inbox, life, mirrors, semaphore, store, topic
from holder_service.ledger import Ledger, stage_mirror
from holder_service.life import Life, LifeChanged, Rebuild
from holder_service.settings import HolderSettings
from holder_service.store import HolderTables
from holder_service.topic import TopicView

logger = logging.getLogger(__name__)

T = TypeVar("T")

REBUILDER_SILENT_MS = 15_000
"""A rebuilder that wrote nothing for so long is taken to be dead. If it is not, its next write fails."""
ALIVE_EVERY_S = 3.0
"""A rebuilder that only reads writes the row this often, so that a long topic is no reason to take over from it."""
REMINDER_S = 60.0
"""How often the log says that the operator's word is awaited."""


class Stopped(Exception):
    """The process was asked to end in the middle of a rebuild: another instance, or its restart, begins it again."""


class Rebuilder:
    """Decides what this instance's database needs before it may serve, and does it.

    Of several instances one rebuilds; the others wait. Whoever writes the database's row first does (compare-and-set);
    killed in the middle, another takes over from the start of the topic: to apply a report twice changes nothing.
    """

    def __init__(
        self,
        database: Database,
        tables: HolderTables,
        settings: HolderSettings,
        *,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._database = database
        self._tables = tables
        self._settings = settings
        self._stopping = stopping
        self._reminded_at_s = float("-inf")

    def enter(self) -> Life | None:
        """The life in which this instance may serve now; None: not yet, ask again soon."""
        with self._database.reading() as connection:
            present = life.load(connection, self._tables)
        try:
            if present is None:
                present = self._begin()
            if present.phase == "ready":
                return present
            if present.phase == "topic_lost":
                self._remind()
                return None
            rebuild = present.rebuild
            if rebuild is not None and rebuild.rebuilder and present.silent_ms < REBUILDER_SILENT_MS:
                return None
            return self._rebuild(present)
        except (LifeChanged, Stopped):
            return None

    def begin_again(self, present: Life) -> None:
        """Begins a new epoch for a database that went back in time; :meth:`enter` then rebuilds it."""
        try:
            with self._database.transaction("life.new_epoch") as connection:
                epoch = store.clock_ms(connection)
                life.change(connection, self._tables, present, phase="rebuilding", epoch=max(epoch, present.epoch + 1))
        except LifeChanged:
            logger.info("another instance began the new epoch first")

    def _begin(self) -> Life:
        view = topic.view(self._settings, self._settings.accounts_topic, self._settings.group_id)
        phase: life.Phase = "ready" if view.untouched else "topic_lost" if view.lost else "rebuilding"
        with self._database.transaction("life.begin") as connection:
            begun = life.begin(connection, self._tables, phase)
        if view.untouched:
            logger.info("first start: %s is empty, and nothing of it was ever read", view.topic)
        elif view.lost:
            logger.error("the database is new, and %s no longer has what was read of it", view.topic)
        else:
            logger.warning("the database is new, and %s has %d messages: rebuilding", view.topic, view.messages)
        return begun

    def _remind(self) -> None:
        if time.monotonic() < self._reminded_at_s + REMINDER_S:
            return
        self._reminded_at_s = time.monotonic()
        logger.error(
            "database and topic were lost together: nobody knows what was given, so nothing is given. "
            "When no operation from before is running any more, run `holder-service go --all`"
        )

    def _rebuild(self, present: Life) -> Life:
        view = topic.view(self._settings, self._settings.accounts_topic, self._settings.group_id)
        started_s = time.monotonic()
        ready = _Run(self._database, self._tables, self._settings, view, present, self._stopping).all()
        logger.warning(
            "rebuilt in %.1f s: epoch %d, %d messages", time.monotonic() - started_s, ready.epoch, view.messages
        )
        return ready


class _Run:
    """One rebuild. Every transaction moves the database's row, so that it fails once another instance took over."""

    def __init__(
        self,
        database: Database,
        tables: HolderTables,
        settings: HolderSettings,
        view: TopicView,
        present: Life,
        stopping: Callable[[], bool],
    ) -> None:
        self._database = database
        self._tables = tables
        self._settings = settings
        self._view = view
        self._stopping = stopping
        self._ledger = Ledger(tables, settings, settings.semaphore())
        self._progress = Rebuild(rebuilder=uuid.uuid4().hex, total=view.messages)
        self._present = present
        self._epoch_acknowledged = 0
        self._written_s = time.monotonic()

    def all(self) -> Life:
        """The whole rebuild. Whatever ends it early leaves it to be taken over at once."""
        try:
            self._take()
            self._restore_limits()
            self._sweep()
            self._replay()
            return self._finish()
        except LifeChanged:
            raise
        except BaseException:
            self._give_up()
            raise

    def _take(self) -> None:
        present = self._present
        # A new one each time: what an unfinished rebuild sent might be acknowledged already by the time that this one
        # reads, and an old copy may have been made at just this point of a life that went on.
        epoch = max(present.now_ms, present.epoch + 1)
        with self._database.transaction("rebuild.take") as connection:
            self._present = life.change(connection, self._tables, present, epoch=epoch, rebuild=self._progress)

    def _restore_limits(self) -> None:
        """The newest mirror of each account becomes its commands again, before any report is read.

        A restored database may have older commands, also in its outbox, or newer ones that it had not sent: merged,
        they are sent again where the topic is not what the database knew.
        """
        newest: dict[str, LimitMirror] = {}
        last: dict[str, LimitMirror] = {}
        for received in read_to_end(self._settings, self._settings.limits_topic):
            self._stay_alive()
            if received.value is None:
                continue
            try:
                mirror = read_limit_mirror(received.value)
            except ValueError as error:
                where = f"{received.topic}/{received.partition} offset {received.offset}"
                logger.warning("%s: ignored: %s", where, error)
                continue
            # The last one need not be the newest: a database may have sent before it was known to be an old copy.
            newest[mirror.account] = mirrors.merge(newest.get(mirror.account, mirror), mirror)
            last[mirror.account] = mirror
        for accounts in _batches(newest, self._settings.batch_max):
            with self._transaction("rebuild.limits") as connection:
                known = store.load_mirrors(connection, self._tables, accounts)
                merged = [mirrors.merge(known.get(account, newest[account]), newest[account]) for account in accounts]
                store.write_mirrors(connection, self._tables, merged)
                differing = [
                    mirror
                    for mirror in merged
                    if last[mirror.account] != mirror or known.get(mirror.account, mirror) != mirror
                ]
                staged = [stage_mirror(self._settings, mirror) for mirror in differing]
                outbox.stage(connection, self._tables.outbox, staged)

    def _sweep(self) -> None:
        """Accounts that a restored database still has go into the new epoch: what they were given counts on."""
        epoch = self._present.epoch
        with self._database.reading() as reading:
            for rows in store.all_rows(reading, self._tables, batch=self._settings.batch_max):
                with self._transaction("rebuild.sweep") as connection:
                    commands = store.load_mirrors(connection, self._tables, [row.account for row in rows])
                    versions = counters.draw(connection, self._tables.counters, store.VERSION_COUNTER, len(rows))
                    now_ms = store.clock_ms(connection)
                    writes = []
                    for row, version in zip(rows, versions, strict=True):
                        state = semaphore.new_epoch(row.state, epoch, commands.get(row.account))
                        writes.append(store.rewrite(row, version, state, due_at_ms=now_ms))
                    store.write_rows(connection, self._tables, writes)

    def _replay(self) -> None:
        extents = self._view.partitions
        # What was refused before the group's committed offset became a dead letter in the earlier life.
        refused_before = {number: extent.committed or 0 for number, extent in extents.items()}
        messages = (
            received
            for received in read_to_end(self._settings, self._view.topic)
            if received.partition in extents and received.offset < extents[received.partition].high
        )
        for batch in _batches(messages, self._settings.batch_max):
            sorted_inbox = inbox.sort(batch)
            self._note_acknowledged(sorted_inbox.letters.values())
            unreadable = [
                letter
                for letter in sorted_inbox.unreadable
                if letter.received.offset >= refused_before[letter.received.partition]
            ]
            self._progress = self._progress.model_copy(update={"read": self._progress.read + len(batch)})
            before = self._present
            with self._transaction("rebuild.replay") as connection:
                outbox.stage(connection, self._tables.outbox, inbox.dead_letters(self._settings, unreadable))
                applied = self._ledger.apply(
                    connection,
                    before,
                    sorted_inbox.letters,
                    missing=semaphore.rebuilding_account,
                    refused_before=refused_before,
                )
            self._ledger.remember(applied)

    def _note_acknowledged(self, letters: Iterable[inbox.Letters]) -> None:
        for account in letters:
            for message in account.messages:
                if isinstance(message, AccountReport) and message.ack is not None:
                    self._epoch_acknowledged = max(self._epoch_acknowledged, message.ack.epoch)

    def _finish(self) -> Life:
        """Puts the partitions' offsets where the rebuild ended: what came meanwhile is simply read after."""
        epoch = max(self._present.epoch, self._epoch_acknowledged + 1)
        with self._database.transaction("rebuild.finish") as connection:
            stored = offsets.load(connection, self._tables.offsets, self._view.topic)
            for number, extent in self._view.partitions.items():
                position = Position(self._view.topic, number, self._view.topic_id, extent.high)
                offsets.advance(connection, self._tables.offsets, stored.get(number), position)
            return life.change(connection, self._tables, self._present, phase="ready", epoch=epoch)

    @contextmanager
    def _transaction(self, place: str) -> Iterator[Connection]:
        """A transaction that fails if another instance took the rebuild over."""
        if self._stopping():
            raise Stopped
        with self._database.transaction(place) as connection:
            yield connection
            present = life.change(connection, self._tables, self._present, rebuild=self._progress)
        self._present, self._written_s = present, time.monotonic()

    def _stay_alive(self) -> None:
        if time.monotonic() >= self._written_s + ALIVE_EVERY_S:
            with self._transaction("rebuild.alive"):
                pass

    def _give_up(self) -> None:
        try:
            with self._database.transaction("rebuild.give_up") as connection:
                life.change(connection, self._tables, self._present, rebuild=Rebuild())
        except (LifeChanged, SQLAlchemyError) as error:
            logger.info("the rebuild is left to another instance: %s", type(error).__name__)


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
