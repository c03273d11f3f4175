"""How every producer, consumer and admin client of this project is configured, and how a topic is identified."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicCollection
from confluent_kafka.admin import AdminClient

from celery_durable.errors import ConfigurationError
from celery_durable.kafka.settings import KafkaSettings
from celery_durable.kafka.throttle import NotRepeated

_librdkafka = logging.getLogger(f"{__name__}.librdkafka")
_librdkafka.addFilter(NotRepeated())

ANSWER_S = 5.0
"""How long one question to Kafka may take, in seconds."""
_RECONNECT_MAX_MS = 1_000
_METADATA_REFRESH_MS = 10_000
_MOCK_CLUSTER = "mockCluster"

Client = TypeVar("Client")


def producer_config(settings: KafkaSettings) -> dict[str, Any]:
    """librdkafka's settings of a producer: idempotent, ``acks=all``, the Java clients' partitioner."""
    deadline_ms = settings.kafka_publish_deadline_ms
    return {
        "request.timeout.ms": deadline_ms,
        **_common(settings),
        "enable.idempotence": True,
        "acks": "all",
        "partitioner": "murmur2_random",
        "linger.ms": settings.kafka_linger_ms,
        "message.timeout.ms": deadline_ms,
        # A topic that does not exist is told as that, before the message times out.
        "topic.metadata.propagation.max.ms": deadline_ms // 2,
    }


def consumer_config(settings: KafkaSettings, group_id: str) -> dict[str, Any]:
    """librdkafka's settings of a member of ``group_id`` whose offsets live in SQL."""
    config: dict[str, Any] = {
        "queued.min.messages": 1_000,
        "queued.max.messages.kbytes": 16_384,
        **_common(settings),
        "group.id": group_id,
        "group.protocol": settings.kafka_group_protocol,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        # A silent jump to another offset would be lost messages: whoever reads decides, by what SQL says.
        "auto.offset.reset": "error",
        "max.poll.interval.ms": settings.kafka_max_poll_interval_ms,
        "fetch.wait.max.ms": settings.kafka_fetch_wait_max_ms,
    }
    if settings.kafka_group_protocol == "classic":
        config |= {
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": settings.kafka_session_timeout_ms,
            "heartbeat.interval.ms": min(3_000, settings.kafka_session_timeout_ms // 4),
        }
    return config


def make_producer(settings: KafkaSettings) -> Producer:
    """A producer of this process. Raises :class:`ConfigurationError` when Kafka is not configured."""
    return _make(lambda: Producer(producer_config(settings), logger=_librdkafka))


def make_consumer(settings: KafkaSettings, group_id: str, **more: Any) -> Consumer:
    """A consumer; ``more`` are callbacks and settings of its own. Raises as :func:`make_producer`."""
    return _make(lambda: Consumer({**consumer_config(settings, group_id), **more}, logger=_librdkafka))


def make_admin(settings: KafkaSettings) -> AdminClient:
    """An admin client. Raises :class:`ConfigurationError` when Kafka is not configured."""
    # Nobody polls it, so its log would pile up unread in a Python logger: only emergencies, to stderr.
    return _make(lambda: AdminClient({**_common(settings), "log_level": 0}))


def is_embedded(cluster_id: str | None) -> bool:
    """True for librdkafka's mock cluster: it answers no admin request and gives topics no ID but the cluster's."""
    return (cluster_id or "").startswith(_MOCK_CLUSTER)


def topic_id(admin: AdminClient, topic: str) -> str | None:
    """Kafka's ID of the topic: a topic that was deleted and made again has another one. None: there is no such topic.

    On the embedded broker, whose topics live and die with it, the cluster's ID, and the topic is made if it is missing.

    :raises KafkaException: Kafka did not answer.
    """
    cluster = admin.list_topics(topic, timeout=ANSWER_S)
    if is_embedded(cluster.cluster_id):
        return str(cluster.cluster_id)
    future = admin.describe_topics(TopicCollection([topic]), request_timeout=ANSWER_S)[topic]
    try:
        return str(future.result(ANSWER_S + 1).topic_id)
    except KafkaException as error:
        if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            return None
        raise


def _common(settings: KafkaSettings) -> dict[str, Any]:
    servers = settings.kafka_bootstrap_servers.strip()
    if not servers:
        raise ConfigurationError(
            "kafka_bootstrap_servers = '': Kafka is not configured; give its addresses as host:port, "
            "or start the embedded broker with `celery -A app durable up`"
        )
    return {
        "client.id": "celery-durable",
        "socket.nagle.disable": True,
        "log.connection.close": False,
        "reconnect.backoff.max.ms": _RECONNECT_MAX_MS,
        "topic.metadata.refresh.interval.ms": _METADATA_REFRESH_MS,
        **settings.kafka_options,
        "bootstrap.servers": servers,
    }


def _make(make: Callable[[], Client]) -> Client:
    try:
        return make()
    except KafkaException as error:
        reason = error.args[0].str() if error.args and isinstance(error.args[0], KafkaError) else str(error)
        raise ConfigurationError(
            f"kafka_options or kafka_bootstrap_servers: librdkafka refuses them: {reason}; "
            "see librdkafka's CONFIGURATION.md for what it accepts"
        ) from None
