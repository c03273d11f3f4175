"""The group's committed offsets as witnesses of what SQL once had (design, section 8).

Nobody reads by them. Each is committed with the ID of its topic as metadata, since an offset means nothing without it.
"""

from __future__ import annotations

from collections.abc import Iterable

from confluent_kafka import Consumer, KafkaException, TopicPartition

from celery_durable.kafka import client
from celery_durable.kafka.opening import Witness
from celery_durable.store.offsets import Position


def witnesses(consumer: Consumer, topic: str, partitions: Iterable[int], topic_id: str) -> dict[int, Witness]:
    """The committed offsets of the consumer's group. One without a topic's ID is taken to be of ``topic_id``.

    :raises KafkaException: Kafka did not answer.
    """
    found = consumer.committed([TopicPartition(topic, partition) for partition in partitions], client.ANSWER_S)
    for one in found:
        if one.error is not None:
            raise KafkaException(one.error)
    return {one.partition: Witness(one.offset, one.metadata or topic_id) for one in found if one.offset >= 0}


def to_commit(position: Position) -> TopicPartition:
    """What to commit once SQL has ``position``."""
    return TopicPartition(position.topic, position.partition, position.next_offset, position.topic_id)
