"""How every producer, consumer and admin client of this project is configured, and how a topic is identified."""

from __future__ import annotations

from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from celery_durable.kafka.settings import KafkaSettings


def producer_config(settings: KafkaSettings) -> dict[str, Any]:
    """librdkafka's settings of a producer: idempotent, ``acks=all``, the Java clients' partitioner."""
    raise NotImplementedError


def consumer_config(settings: KafkaSettings, group_id: str) -> dict[str, Any]:
    """librdkafka's settings of a member of ``group_id`` whose offsets live in SQL."""
    raise NotImplementedError


def make_producer(settings: KafkaSettings) -> Producer:
    """A producer of this process. Raises :class:`ConfigurationError` when Kafka is not configured."""
    raise NotImplementedError


def make_admin(settings: KafkaSettings) -> AdminClient:
    """An admin client. Raises :class:`ConfigurationError` when Kafka is not configured."""
    raise NotImplementedError


def partition_of(key: str, partitions: int) -> int:
    """The partition that our producers and the Java clients give ``key`` in a topic of ``partitions``."""
    raise NotImplementedError
