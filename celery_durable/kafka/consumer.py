"""Reading partitions whose offsets live in SQL (rule 7): one member of a consumer group, and the traps of that.

The owner's loop is::

    batches = reader.read(timeout_s, limit)
    with database.transaction() as connection:
        for batch in batches:
            offsets.advance(connection, table, batch.old, batch.new)   # OffsetMoved: reader.drop(batch.partition)
            ...                                                        # the effects of batch.messages
    reader.commit(batches)

A batch that was not handed to :meth:`PartitionReader.commit` before the next ``read`` is read again, from where SQL
says by then: an owner whose transaction failed has nothing to undo. All methods are for one thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from celery_durable.crashpoints import crashpoint
from celery_durable.kafka import client
from celery_durable.kafka.opening import Opening, open_partition
from celery_durable.kafka.received import Received, place, received
from celery_durable.kafka.settings import KafkaSettings
from celery_durable.kafka.throttle import Throttled
from celery_durable.kafka.topic_watch import TopicWatch
from celery_durable.kafka.witness import to_commit, witnesses
from celery_durable.store.offsets import Position

logger = logging.getLogger(__name__)

DROPPED_S = 0.2
"""How long a dropped partition rests before it is opened again, in seconds."""
CLOSE_S = 10.0
"""How long leaving the group may take, in seconds.

librdkafka's close has no deadline. It waits for the answers to offsets that are being committed: for the session
timeout at least where the coordinator is away, for ever where the connection broke with a commit on it (librdkafka
issue 3740). A consumer left behind goes on closing, and leaves the group when Kafka is back; until then the group
drops it after its session timeout, and refuses its commit once another member has joined."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages of one partition, in order, and the move of its position by compare-and-set, from ``old`` to ``new``."""

    partition: int
    messages: Sequence[Received]
    old: Position | None
    """The position that SQL must still have; None: it must have no row."""
    new: Position


Load = Callable[[], Mapping[int, Position]]
"""Reads the stored positions of the topic, by partition (:func:`celery_durable.store.offsets.load`)."""
OnOpen = Callable[[Sequence[Opening]], None]
"""Called before the first message of newly taken (or reopened) partitions. What it raises closes the consumer, and
``read`` raises it."""
OnClose = Callable[[Collection[int]], None]
"""Called when partitions are no longer read by this member (revoked, lost or dropped): forget what is cached."""


@dataclass(slots=True)
class _Open:
    """A partition that is read now."""

    stored: Position | None
    next_offset: int
    fresh: bool = True
    """Nothing came since it was opened: its first message may lie behind a gap."""


@dataclass(slots=True)
class _Session:
    """One consumer instance and what it was assigned."""

    consumer: Consumer
    topic_id: str
    open: dict[int, _Open] = field(default_factory=dict)
    closed: dict[int, float] = field(default_factory=dict)
    """Assigned but not read: when to open it (again), by the monotonic clock."""
    failure: BaseException | None = None
    broken: str | None = None
    """Why this instance must be replaced, if it must."""


class PartitionReader:
    """One member of the consumer group ``group_id`` on ``topic``.

    Guarantees: a message is given only after its partition was opened at a position that was compared with SQL, the
    topic and the group; within a partition messages come in order; nothing is skipped without ``trimmed`` or
    ``recreated``. It does not guarantee that no other member gives the same message: that is the compare-and-set's.

    :param load: reads the stored positions; called whenever partitions are opened.
    :param on_open: told of every partition that is opened.
    :param on_close: told of every partition that is no longer read.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        *,
        topic: str,
        group_id: str,
        load: Load,
        on_open: OnOpen | None = None,
        on_close: OnClose | None = None,
    ) -> None:
        self._settings = settings
        self._topic = topic
        self._group_id = group_id
        self._load = load
        self._on_open = on_open
        self._on_close = on_close
        self._session: _Session | None = None
        self._watch = TopicWatch(settings, topic)
        self._given: dict[int, Batch] = {}
        self._warnings = Throttled(logger)

    @property
    def partitions(self) -> frozenset[int]:
        """The partitions that this member reads now."""
        return frozenset() if self._session is None else frozenset(self._session.open)

    def read(self, timeout_s: float, limit: int) -> list[Batch]:
        """Waits up to ``timeout_s`` for a first message, then takes what is there, at most ``limit`` messages.

        Empty when nothing came. Raises what :data:`Load` or :data:`OnOpen` raised, and :class:`KafkaException` when
        Kafka cannot be used; the next call starts anew.
        """
        session = self._session or self._start()
        if session is None:
            time.sleep(min(timeout_s, 1.0))
            return []
        try:
            self._reopen_due(session)
            if self._watch.is_another():
                session.broken = "the topic was deleted and created again"
            batches = self._receive(session, timeout_s, limit)
            if session.failure is not None:
                raise session.failure
        except BaseException:
            self._end(session)
            raise
        if session.broken is not None:
            logger.warning("%s: %s; reading it with a new consumer", self._topic, session.broken)
            self._end(session)
            return []
        self._given = {batch.partition: batch for batch in batches}
        return batches

    def commit(self, batches: Sequence[Batch]) -> None:
        """Says that the batches are committed in SQL: only then is the group's offset moved too, as a witness."""
        session = self._session
        committed = []
        for batch in batches:
            if self._given.get(batch.partition) is not batch or session is None:
                continue
            del self._given[batch.partition]
            if batch.partition in session.open:
                session.open[batch.partition].stored = batch.new
            committed.append(to_commit(batch.new))
        if session is not None and committed:
            crashpoint("reader.offset", "before_acknowledge")
            try:
                session.consumer.commit(offsets=committed, asynchronous=True)
            except KafkaException as error:
                self._warnings.warning("commit", "%s: the group's offset was not committed: %s", self._topic, error)
            crashpoint("reader.offset", "after_acknowledge")

    def drop(self, partition: int) -> None:
        """Stops reading a partition after a lost compare-and-set.

        If the group still gives it to this member a moment later, it is opened again from what SQL says then.
        """
        logger.info("%s [%d]: dropped, another consumer moved its offset", self._topic, partition)
        self._close_partitions([partition], again_in_s=DROPPED_S)

    def close(self) -> None:
        """Leaves the group, so that others take over at once. ``read`` may not be called again."""
        if self._session is not None:
            self._end(self._session)

    # Joining and leaving

    def _start(self) -> _Session | None:
        identity = self._watch.identify()
        if identity is None:
            self._warnings.warning(
                "missing", "%s: there is no such topic; create it with the command `topics apply`", self._topic
            )
            return None

        def failed(error: KafkaError) -> None:
            if error.fatal():
                session.broken = f"fatal error of the consumer: {error.str()}"

        consumer = client.make_consumer(self._settings, self._group_id, error_cb=failed, on_commit=self._on_commit)
        session = _Session(consumer, identity)

        # librdkafka assigns at its own offsets if this callback raises: nothing may leave it.
        # The thread that closes a consumer serves what is still pending: by then another session may be the reader's.
        def assigned(consumer: Consumer, partitions: list[TopicPartition]) -> None:
            if self._session is not session:
                consumer.incremental_assign([])
                return
            try:
                starts = self._open(session, [p.partition for p in partitions])
                consumer.incremental_assign(
                    [TopicPartition(self._topic, partition, start) for partition, start in starts.items()]
                )
            except BaseException as error:  # noqa: BLE001 - raised again by read()
                session.failure = error
                session.open.clear()
                consumer.incremental_assign([])

        def revoked(consumer: Consumer, partitions: list[TopicPartition]) -> None:
            if self._session is session:
                # librdkafka remembers a pause across assignments: a partition that comes back would stay silent.
                consumer.resume([p for p in partitions if p.partition in session.closed])
                self._forget(session, [p.partition for p in partitions])
            consumer.incremental_unassign(partitions)

        consumer.subscribe([self._topic], on_assign=assigned, on_revoke=revoked, on_lost=revoked)
        self._session = session
        return session

    def _end(self, session: _Session) -> None:
        self._session = None
        self._given = {}
        self._tell_closed(session, list(session.open))
        session.open.clear()
        session.closed.clear()
        closing = threading.Thread(target=self._leave, args=(session.consumer,), name="consumer-close", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            logger.warning("%s: the consumer did not close within %g s: left behind", self._topic, CLOSE_S)

    def _leave(self, consumer: Consumer) -> None:
        try:
            consumer.close()
        except (KafkaException, RuntimeError) as error:
            logger.warning("%s: closing the consumer: %s", self._topic, error)

    # Opening and closing partitions

    def _open(self, session: _Session, partitions: Sequence[int]) -> dict[int, int]:
        """Opens assigned partitions. Returns where each starts."""
        if not partitions:
            return {}
        consumer, topic = session.consumer, self._topic
        committed = witnesses(consumer, topic, partitions, session.topic_id)
        # Only after the committed offsets: what is committed was in SQL before, so SQL can only be ahead.
        stored = self._load()
        openings = []
        for partition in partitions:
            low, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=client.ANSWER_S)
            opening = open_partition(
                partition, session.topic_id, low, high, stored.get(partition), committed.get(partition)
            )
            openings.append(opening)
            _log_opening(topic, opening)
        if self._on_open is not None:
            self._on_open(openings)
        for opening in openings:
            session.open[opening.partition] = _Open(opening.stored, opening.start)
            session.closed.pop(opening.partition, None)
        return {opening.partition: opening.start for opening in openings}

    def _close_partitions(self, partitions: Iterable[int], *, again_in_s: float) -> None:
        session = self._session
        if session is None:
            return
        closing = [partition for partition in partitions if partition in session.open]
        for partition in closing:
            del session.open[partition]
            self._given.pop(partition, None)
            session.closed[partition] = time.monotonic() + again_in_s
        if closing:
            session.consumer.pause([TopicPartition(self._topic, partition) for partition in closing])
            self._tell_closed(session, closing)

    def _reopen_due(self, session: _Session) -> None:
        """Opens again what was dropped, and what the owner was given but did not commit."""
        self._close_partitions(list(self._given), again_in_s=0.0)
        now = time.monotonic()
        due = [partition for partition, at in session.closed.items() if at <= now]
        for partition, start in self._open(session, due).items():
            session.consumer.seek(TopicPartition(self._topic, partition, start))
            session.consumer.resume([TopicPartition(self._topic, partition)])

    def _forget(self, session: _Session, partitions: Sequence[int]) -> None:
        closing = [partition for partition in partitions if session.open.pop(partition, None) is not None]
        for partition in partitions:
            session.closed.pop(partition, None)
            self._given.pop(partition, None)
        self._tell_closed(session, closing)

    def _tell_closed(self, session: _Session, partitions: Collection[int]) -> None:
        if partitions and self._on_close is not None:
            try:
                self._on_close(partitions)
            except Exception as error:  # noqa: BLE001 - librdkafka calls this too: nothing may leave its callback
                logger.warning("%s: on_close: %s: %s", self._topic, type(error).__name__, error)
                session.failure = error

    # Receiving

    def _receive(self, session: _Session, timeout_s: float, limit: int) -> list[Batch]:
        if session.closed:
            timeout_s = min(timeout_s, DROPPED_S)
        # consume(limit, timeout) would wait for the whole timeout unless `limit` messages came.
        first = session.consumer.poll(timeout_s)
        if first is None:
            return []
        partition, _ = place(first)
        opened = session.open.get(partition)
        more = session.consumer.consume(limit - 1, 0) if limit > 1 else []
        taken: dict[int, list[Received]] = {}
        if session.open.get(partition) is opened:
            self._take(session, first, taken)
        for message in more:
            self._take(session, message, taken)
        return [
            Batch(partition, messages, session.open[partition].stored, self._position(session, partition))
            for partition, messages in taken.items()
            if partition in session.open
        ]

    def _take(self, session: _Session, message: Message, taken: dict[int, list[Received]]) -> None:
        error = message.error()
        if error is not None:
            self._on_message_error(session, error)
            return
        partition, offset = place(message)
        opened = session.open.get(partition)
        if opened is None or offset < opened.next_offset:
            return
        if offset > opened.next_offset and not opened.fresh:
            # The topics here have neither transactions nor compaction, so a gap is a loss: look at the topic again.
            session.broken = f"partition {partition} jumped from offset {opened.next_offset} to {offset}"
            del session.open[partition]
            return
        opened.next_offset = offset + 1
        opened.fresh = False
        taken.setdefault(partition, []).append(received(message))

    def _position(self, session: _Session, partition: int) -> Position:
        return Position(self._topic, partition, session.topic_id, session.open[partition].next_offset)

    # Errors

    def _on_message_error(self, session: _Session, error: KafkaError) -> None:
        code = error.code()
        if error.fatal() or code == KafkaError._FATAL:
            session.broken = f"fatal error of the consumer: {error.str()}"
        elif code in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            session.broken = f"the topic was trimmed or recreated while it was read ({error.str()})"
        elif code == KafkaError._MAX_POLL_EXCEEDED:
            logger.warning("%s: polled too late (kafka_max_poll_interval_ms); its partitions went away", self._topic)
        elif code != KafkaError._PARTITION_EOF:
            self._warnings.warning(code, "%s: %s", self._topic, error.str())

    def _on_commit(self, error: KafkaError | None, _partitions: list[TopicPartition]) -> None:
        if error is not None:
            logger.debug("%s: the group's offset was not committed: %s", self._topic, error)


def _log_opening(topic: str, opening: Opening) -> None:
    where = f"{topic} [{opening.partition}]"
    if opening.went_back:
        logger.warning(
            "%s: the database is behind the committed offset (%s < %s): it was lost or restored",
            where,
            opening.stored.next_offset if opening.stored else "nothing",
            opening.committed,
        )
    if opening.recreated:
        # The embedded broker keeps nothing on disk: there every restart of it is a new topic, and no surprise.
        level = logging.INFO if client.is_embedded(opening.topic_id) else logging.WARNING
        logger.log(level, "%s: the topic was recreated or cut: reading from its start, offset %d", where, opening.start)
    elif opening.trimmed:
        logger.warning("%s: messages were trimmed before they were read: reading from %d", where, opening.start)
    else:
        logger.debug("%s: reading from %d of %d", where, opening.start, opening.high)
