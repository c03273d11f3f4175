"""Reads this client's replies topic and applies each batch in the transaction that moves its offset."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from confluent_kafka import KafkaException
from pydantic import ValidationError
from sqlalchemy import Connection

from celery_durable.dispatcher.failures import together_or_one_by_one
from celery_durable.kafka import client
from celery_durable.kafka.consumer import Batch, PartitionReader
from celery_durable.kafka.dead_letters import dead_letter, why_unreadable
from celery_durable.kafka.opening import Opening, went_back
from celery_durable.kafka.received import Received
from celery_durable.kafka.witness import witnesses
from celery_durable.permits.messages import AccountReply, read_reply
from celery_durable.runtime import Runtime
from celery_durable.store import offsets, outbox
from celery_durable.store.accounts import client_identity
from celery_durable.store.offsets import OffsetMoved, Position

logger = logging.getLogger(__name__)

READ_S = 1.0
"""How long one step waits for a first reply, in seconds."""
BATCH_MAX = 500


class ReplySink(Protocol):
    """What the replies are for: :class:`celery_durable.dispatcher.passes.Passes`."""

    def apply_replies(
        self, connection: Connection, replies: Sequence[AccountReply], *, one_by_one: bool
    ) -> Callable[[], None]:
        """Brings the replies' accounts up to date in the caller's transaction. To call what it returns after commit.

        :param one_by_one: a reply that fails is left out.
        """

    def restored(self, connection: Connection) -> None:
        """The database was restored from a backup: voids all permits, before anything is admitted (section 8)."""


def group_id(client_id: str, incarnation: str) -> str:
    """The Kafka consumer group of a database's dispatchers.

    Of the database, not of the client: a second one under the same name (case A35) would take partitions away from the
    first, and ignore what it reads there.
    """
    return f"celery-durable-{client_id}-{incarnation}"


class ReplyReader:
    """The client's reader of replies: a member of the group :func:`group_id`. For one thread.

    Several dispatchers share the partitions. A reply that cannot be read goes to the dead-letter topic and the
    partition goes on (case B7); one for another incarnation of the database is the sink's to ignore.
    """

    def __init__(self, runtime: Runtime, sink: ReplySink) -> None:
        self._runtime = runtime
        self._settings = runtime.settings
        self._sink = sink
        self._topic = runtime.settings.replies_topic(runtime.settings.client_id)
        with runtime.database.transaction("dispatcher.identify") as connection:
            self._group_id = group_id(*client_identity(connection, runtime.tables, runtime.settings.client_id))
        self._reader = PartitionReader(
            runtime.settings, topic=self._topic, group_id=self._group_id, load=self._load, on_open=self._opened
        )

    def check_restored(self) -> bool:
        """Compares the stored offsets with the committed ones without joining the group; call it before admitting.

        Where the database went back, the sink is told so before this returns. False: Kafka did not answer, so nothing
        is known; the same comparison is made again when partitions are assigned.
        """
        try:
            lost = self._went_back()
        except KafkaException as error:
            logger.warning(
                "kafka_bootstrap_servers = %r: Kafka does not answer, so it is not known yet whether this database was "
                "restored; start Kafka there or correct the address: it is asked again and again, and nothing is lost "
                "(%s)",
                self._settings.kafka_bootstrap_servers,
                error,
            )
            return False
        if lost:
            self._restored()
        return True

    def step(self) -> float | None:
        """Waits up to a second for replies and applies them.

        Always None, as a :data:`celery_durable.scheduling.loop.Step`: the wait is the pause.
        """
        for batch in self._reader.read(READ_S, BATCH_MAX):
            try:
                self._apply(batch)
            except OffsetMoved as error:
                logger.info("%s", error)
                self._reader.drop(batch.partition)
            else:
                self._reader.commit([batch])
        return None

    def close(self) -> None:
        """Leaves the group."""
        self._reader.close()

    def _apply(self, batch: Batch) -> None:
        tables = self._runtime.tables
        replies: list[AccountReply] = []
        dead: list[outbox.Staged] = []
        for message in batch.messages:
            reply = self._read(message)
            if isinstance(reply, AccountReply):
                replies.append(reply)
            else:
                dead.append(dead_letter(self._settings, message, reply))

        def in_one_transaction(one_by_one: bool) -> Callable[[], None]:
            with self._runtime.database.transaction("replies.apply") as connection:
                offsets.advance(connection, tables.offsets, batch.old, batch.new)
                after_commit = self._sink.apply_replies(connection, replies, one_by_one=one_by_one)
                outbox.stage(connection, tables.outbox, dead)
                return after_commit

        together_or_one_by_one(in_one_transaction)()

    def _read(self, message: Received) -> AccountReply | str:
        """The reply, or why it is none."""
        try:
            reply = read_reply(message.value or b"")
        except ValidationError as error:
            return why_unreadable(error)
        if reply.client_id != self._settings.client_id:
            return f"client_id: {reply.client_id[:100]!r} is another client than this topic's"
        return reply

    def _load(self) -> Mapping[int, Position]:
        with self._runtime.database.reading() as connection:
            return offsets.load(connection, self._runtime.tables.offsets, self._topic)

    def _opened(self, openings: Sequence[Opening]) -> None:
        if any(opening.went_back for opening in openings):
            self._restored()

    def _restored(self) -> None:
        with self._runtime.database.transaction("replies.restored") as connection:
            self._sink.restored(connection)

    def _went_back(self) -> bool:
        topic_id = client.topic_id(client.make_admin(self._settings), self._topic)
        if topic_id is None:
            return False
        consumer = client.make_consumer(self._settings, self._group_id)
        try:
            partitions = consumer.list_topics(self._topic, timeout=client.ANSWER_S).topics[self._topic].partitions
            committed = witnesses(consumer, self._topic, partitions, topic_id)
        finally:
            consumer.close()
        stored = self._load()
        return any(went_back(topic_id, stored.get(number), witness) for number, witness in committed.items())
