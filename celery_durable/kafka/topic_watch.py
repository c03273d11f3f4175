"""Whether a topic that is being read is still the same one, or was deleted and made again under its name (case B8)."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

from confluent_kafka import TopicCollection
from confluent_kafka.admin import AdminClient

from celery_durable.kafka import client
from celery_durable.kafka.settings import KafkaSettings

LOOK_EVERY_S = 10.0
"""How often the topic's ID is looked at, in seconds."""


class TopicWatch:
    """Looks at one topic's ID now and then. For one thread."""

    def __init__(self, settings: KafkaSettings, topic: str) -> None:
        self._settings = settings
        self._topic = topic
        self._admin: AdminClient | None = None
        self._topic_id: str | None = None
        self._answer: Future[Any] | None = None
        self._asked_at = 0.0

    def identify(self) -> str | None:
        """The topic's ID (:func:`celery_durable.kafka.client.topic_id`), with which :meth:`is_another` compares.

        :raises KafkaException: Kafka did not answer.
        """
        if self._admin is None:
            self._admin = client.make_admin(self._settings)
        self._topic_id = client.topic_id(self._admin, self._topic)
        self._answer, self._asked_at = None, time.monotonic()
        return self._topic_id

    def is_another(self) -> bool:
        """Whether the topic has another ID than it had for :meth:`identify`, as far as Kafka has said. Never waits."""
        if self._admin is None or client.is_embedded(self._topic_id):
            return False
        another = False
        if self._answer is not None and self._answer.done():
            answer, self._answer = self._answer, None
            another = answer.exception() is None and str(answer.result().topic_id) != self._topic_id
        if self._answer is None and time.monotonic() - self._asked_at > LOOK_EVERY_S:
            self._asked_at = time.monotonic()
            topics = TopicCollection([self._topic])
            self._answer = self._admin.describe_topics(topics, request_timeout=client.ANSWER_S)[self._topic]
        return another
