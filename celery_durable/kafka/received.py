"""Messages as they come from Kafka, and the reading of a whole topic without a group."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from celery_durable.kafka import client
from celery_durable.kafka.settings import KafkaSettings

SILENCE_MAX_S = 60.0
"""How long Kafka may give nothing while a topic is read."""


@dataclass(frozen=True, slots=True)
class Received:
    """One message, as it came."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


def read_to_end(settings: KafkaSettings, topic: str, *, silence_max_s: float = SILENCE_MAX_S) -> Iterator[Received]:
    """Every message of the topic from its start to the end that it has now, without a group (the limits mirror).

    A topic that does not exist has none. It takes as long as it takes: :class:`TimeoutError` is raised only where
    Kafka gave nothing for ``silence_max_s`` seconds.
    """
    consumer = client.make_consumer(settings, "celery-durable-read", **{"enable.partition.eof": True})
    try:
        found = consumer.list_topics(topic, timeout=client.ANSWER_S).topics[topic]
        if found.error is not None and found.error.code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise KafkaException(found.error)
        ends = {
            partition: consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=client.ANSWER_S)
            for partition in sorted(found.partitions)
        }
        unread = {partition for partition, (low, high) in ends.items() if low < high}
        consumer.assign([TopicPartition(topic, partition, ends[partition][0]) for partition in unread])
        silent_since = time.monotonic()
        while unread:
            message = consumer.poll(0.2)
            error = None if message is None else message.error()
            if message is None or (error is not None and error.retriable()):
                if time.monotonic() > silent_since + silence_max_s:
                    raise TimeoutError(f"{topic}: not read to its end: Kafka gave nothing for {silence_max_s:g} s")
                continue
            partition, offset = place(message)
            if error is None:
                if offset < ends[partition][1]:
                    yield received(message)
                if offset + 1 >= ends[partition][1]:
                    unread.discard(partition)
            elif error.code() == KafkaError._PARTITION_EOF:
                unread.discard(partition)
            else:
                raise KafkaException(error)
            silent_since = time.monotonic()  # what the caller did with it took its own time
    finally:
        consumer.close()


def place(message: Message) -> tuple[int, int]:
    """(partition, offset) of a message; -1 where an error has none."""
    partition, offset = message.partition(), message.offset()
    return -1 if partition is None else partition, -1 if offset is None else offset


def received(message: Message) -> Received:
    """The message as it came."""
    partition, offset = place(message)
    return Received(
        topic=message.topic() or "",
        partition=partition,
        offset=offset,
        key=_bytes(message.key()),
        value=_bytes(message.value()),
        headers=tuple((name, _bytes(value)) for name, value in _headers(message)),
    )


def _headers(message: Message) -> Iterable[tuple[str, str | bytes | None]]:
    headers = message.headers() or ()
    return headers.items() if isinstance(headers, dict) else headers


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value
