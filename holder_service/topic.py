"""What the accounts topic looks like as a whole, before any partition is owned: for the choice of the first step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from celery_durable.errors import DurableError
from celery_durable.kafka.client import ANSWER_S, make_admin, make_consumer, topic_id
from celery_durable.kafka.settings import KafkaSettings
from celery_durable.kafka.witness import witnesses


@dataclass(frozen=True, slots=True)
class Extent:
    """One partition: its first offset, its end, and the group's committed offset (None: there is none)."""

    low: int
    high: int
    committed: int | None
    foreign: bool = False
    """The committed offset is of a topic that this one took the place of."""


@dataclass(frozen=True, slots=True)
class TopicView:
    """The topic's partitions as they were at one moment. A topic that does not exist has none."""

    topic: str
    topic_id: str
    partitions: Mapping[int, Extent]

    @property
    def messages(self) -> int:
        """Messages that it has."""
        return sum(extent.high - extent.low for extent in self.partitions.values())

    @property
    def untouched(self) -> bool:
        """Nothing was ever read here, and nothing is there to read: a first start."""
        return self.messages == 0 and all(extent.committed is None for extent in self.partitions.values())

    @property
    def lost(self) -> bool:
        """The group has read what the topic no longer has: all of it is gone, or another topic took its place."""
        read = [extent for extent in self.partitions.values() if extent.committed is not None]
        return bool(read) and (self.messages == 0 or any(extent.foreign for extent in read))


class KafkaUnavailable(DurableError):
    """Kafka does not answer. It may be back later, so a holder that runs asks again."""


def view(settings: KafkaSettings, topic: str, group_id: str) -> TopicView:
    """Looks at ``topic`` without joining ``group_id``.

    :raises KafkaUnavailable: no broker answers.
    :raises KafkaException: a broker answered with an error.
    """
    try:
        identity = topic_id(make_admin(settings), topic)
    except KafkaException as error:
        if error.args[0].code() not in (KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError._ALL_BROKERS_DOWN):
            raise
        raise KafkaUnavailable(
            f"kafka_bootstrap_servers = {settings.kafka_bootstrap_servers!r}: Kafka does not answer "
            f"({error.args[0].str()}); start it or correct the addresses"
        ) from None
    if identity is None:
        return TopicView(topic, "", {})
    # Nobody polls this consumer, so what it logs would come in one heap as it closes.
    consumer = make_consumer(settings, group_id, log_level=0)
    try:
        return TopicView(topic, identity, _extents(consumer, topic, identity))
    finally:
        consumer.close()


def _extents(consumer: Consumer, topic: str, identity: str) -> dict[int, Extent]:
    metadata = consumer.list_topics(topic, timeout=ANSWER_S).topics.get(topic)
    numbers = [] if metadata is None else sorted(metadata.partitions)
    if not numbers:
        return {}
    # The group's offsets first: what is committed later is in the partition's extent for certain.
    committed = witnesses(consumer, topic, numbers, identity)
    extents = {}
    for number in numbers:
        low, high = consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=ANSWER_S)
        witness = committed.get(number)
        foreign = witness is not None and (witness.offset > high or witness.topic_id != identity)
        extents[number] = Extent(low, high, None if witness is None else witness.offset, foreign)
    return extents
