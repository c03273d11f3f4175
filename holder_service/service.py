"""The holder at work: what came from Kafka, and the timers that are over, as transactions (design, section 9)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from sqlalchemy import Connection

from celery_durable.kafka.consumer import Batch, PartitionReader
from celery_durable.kafka.opening import Opening
from celery_durable.store import offsets, outbox
from celery_durable.store.database import Database
from celery_durable.store.offsets import OffsetMoved, Position
from holder_service import inbox, life, store, topic
from holder_service.inbox import Inbox, Letters
from holder_service.ledger import Applied, Ledger
from holder_service.life import Life, LifeChanged
from holder_service.rebuild import Rebuilder
from holder_service.settings import HolderSettings
from holder_service.store import HolderTables, VersionMoved

logger = logging.getLogger(__name__)

TIMERS_RECHECK_S = 1.0
"""How often the timers' index is read anew: `holder-service go` and other instances may have written rows."""
TRIES_MAX = 20
"""Lost compare-and-sets in a row of one batch, after which the loop backs off and the batch is read again."""
WAITING_S = 0.5
"""Pause while another instance rebuilds, or while the operator's word is awaited."""


class WentBack(Exception):
    """The database is behind the offset that the group committed: it was lost, or restored to an earlier state."""


class Service:
    """One instance: reads its partitions, decides, and leaves the replies in the outbox.

    :meth:`step` is the body of a loop (:data:`celery_durable.scheduling.loop.Step`); it waits for messages itself, at
    most ``settings.poll_max_ms``. SIGKILL at any point loses nothing: a batch is one transaction with its offset, and
    what was not committed is read again. For one thread.

    :param wake_relay: called when the outbox may have something: after a commit, and with new partitions, whose last
        owner may have left it there.
    """

    def __init__(
        self,
        database: Database,
        tables: HolderTables,
        settings: HolderSettings,
        *,
        wake_relay: Callable[[], None],
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._database = database
        self._tables = tables
        self._settings = settings
        self._wake_relay = wake_relay
        self._ledger = Ledger(tables, settings, settings.semaphore())
        self._rebuilder = Rebuilder(database, tables, settings, stopping=stopping)
        self._life: Life | None = None
        self._compared = False
        self._reader: PartitionReader | None = None
        self._timers_at_s = 0.0

    @property
    def life(self) -> Life | None:
        """The life of the database in which this instance serves; None while it does not serve yet."""
        return self._life

    @property
    def may_send(self) -> bool:
        """Whether the outbox may be sent: not before the database was compared with what the group committed.

        Until then it may be an old copy, whose commands would hide newer ones in the compacted limits topic.
        """
        return self._compared

    @property
    def partitions(self) -> frozenset[int]:
        """The partitions that this instance serves now."""
        return frozenset() if self._reader is None else self._reader.partitions

    def step(self) -> float | None:
        """Waits for messages and handles them, then the timers that are over."""
        try:
            if self._life is None:
                self._life = self._rebuilder.enter()
                if self._life is None:
                    return WAITING_S
                logger.info("in service: epoch %d", self._life.epoch)
            reader = self._reader_now()
            pause_s = max(0.0, min(self._timers_at_s - time.monotonic(), self._settings.poll_max_ms / 1000))
            batches = reader.read(pause_s, self._settings.batch_max)
            if batches:
                self._consume(self._life, reader, batches)
            if time.monotonic() >= self._timers_at_s:
                self._run_timers(self._life, reader)
        except LifeChanged:
            logger.warning("another instance began a new life of the database: leaving service until it is ready")
            self._leave()
        except WentBack as error:
            logger.error("%s: a new epoch begins, and the accounts are rebuilt from the topic", error)
            present = self._life
            self._leave()
            if present is not None:
                self._rebuilder.begin_again(present)
        return None

    def close(self) -> None:
        """Leaves the group, so that other instances take the partitions over at once."""
        self._leave()

    def _reader_now(self) -> PartitionReader:
        if self._reader is None:
            self._reader = PartitionReader(
                self._settings,
                topic=self._settings.accounts_topic,
                group_id=self._settings.group_id,
                load=self._load_positions,
                on_open=self._opened,
                on_close=self._closed,
            )
        return self._reader

    def _leave(self) -> None:
        self._life, self._compared = None, False
        self._ledger.clear()
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _load_positions(self) -> Mapping[int, Position]:
        with self._database.reading() as connection:
            return offsets.load(connection, self._tables.offsets, self._settings.accounts_topic)

    def _opened(self, openings: Sequence[Opening]) -> None:
        name = self._settings.accounts_topic
        for opening in openings:
            if opening.went_back:
                stored = "none" if opening.stored is None else opening.stored.next_offset
                raise WentBack(
                    f"{name} [{opening.partition}]: the database's offset ({stored}) is behind "
                    f"the group's ({opening.committed})"
                )
        self._compared = True
        self._wake_relay()
        if any(opening.recreated for opening in openings):
            count = len(topic.view(self._settings, name, self._settings.group_id).partitions)
            with self._database.transaction("holder.adopt") as connection:
                store.adopt_partitions(connection, self._tables, count)
        self._timers_at_s = 0.0

    def _closed(self, partitions: Collection[int]) -> None:
        self._ledger.forget_partitions(partitions)

    def _consume(self, present: Life, reader: PartitionReader, batches: Sequence[Batch]) -> None:
        left = list(batches)
        for _ in range(TRIES_MAX):
            messages = inbox.sort([message for batch in left for message in batch.messages])
            try:
                with self._database.transaction("holder.batch") as connection:
                    self._advance(connection, left)
                    applied = self._apply(connection, present, messages)
            except OffsetMoved as error:
                for partition in error.partitions:
                    logger.warning(
                        "partition %d: another holder moved its offset: dropped, nothing committed", partition
                    )
                    reader.drop(partition)
                self._ledger.forget_partitions(error.partitions)
                left = [batch for batch in left if batch.partition not in error.partitions]
                if not left:
                    return
            except VersionMoved as error:
                logger.info("%s: reloaded", error)
                self._ledger.forget(messages.letters)
            else:
                self._committed(applied)
                reader.commit(left)
                return
        raise VersionMoved(f"{TRIES_MAX} tries in a row lost an account to another holder")

    def _advance(self, connection: Connection, batches: Sequence[Batch]) -> None:
        offsets.advance_all(connection, self._tables.offsets, [(batch.old, batch.new) for batch in batches])

    def _apply(self, connection: Connection, present: Life, messages: Inbox) -> Applied:
        outbox.stage(connection, self._tables.outbox, inbox.dead_letters(self._settings, messages.unreadable))
        return self._ledger.apply(connection, present, messages.letters)

    def _run_timers(self, present: Life, reader: PartitionReader) -> None:
        partitions = reader.partitions
        self._timers_at_s = time.monotonic() + TIMERS_RECHECK_S
        if not partitions:
            return
        with self._database.reading() as connection:
            current = life.load(connection, self._tables)
            if current is None or current.revision != present.revision:
                raise LifeChanged
            now_ms = current.now_ms
            next_ms = store.next_due_ms(connection, self._tables, partitions)
            if next_ms is None or next_ms > now_ms:
                self._expect_timer(next_ms, now_ms)
                return
            due = store.due_accounts(connection, self._tables, partitions, now_ms, limit=self._settings.batch_max)
        work = {account: Letters(partition) for account, partition in due}
        try:
            with self._database.transaction("holder.timers") as connection:
                applied = self._ledger.apply(connection, present, work)
        except VersionMoved as error:
            logger.info("%s: reloaded", error)
            self._ledger.forget(work)
        else:
            self._committed(applied)
        self._timers_at_s = 0.0

    def _committed(self, applied: Applied) -> None:
        self._ledger.remember(applied)
        self._expect_timer(applied.next_due_ms, applied.now_ms)
        self._wake_relay()

    def _expect_timer(self, due_ms: int | None, now_ms: int) -> None:
        if due_ms is not None:
            at_s = time.monotonic() + max(0, due_ms - now_ms) / 1000
            self._timers_at_s = min(self._timers_at_s, at_s)
