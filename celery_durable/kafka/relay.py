"""The relay: sends what is due in an outbox to Kafka, and deletes what Kafka has acknowledged."""

from __future__ import annotations

from sqlalchemy import Table

from celery_durable.kafka.settings import KafkaSettings
from celery_durable.store.database import Database


class Relay:
    """Sends the rows of one outbox, at least once each; several relays may share it.

    Rows are claimed in a short transaction, produced with no lock held, and deleted only for a delivery report that
    says so, only at the version that was sent. An error holds back its own row, by a growing pause; a hung broker
    costs ``kafka_publish_deadline_ms``. Reordering is harmless (rule 5). For one thread.

    :param batch_max: rows at most in one batch.
    """

    def __init__(
        self,
        database: Database,
        outbox: Table,
        settings: KafkaSettings,
        *,
        batch_max: int = 500,
        retry_min_ms: int = 100,
        retry_max_ms: int = 30_000,
    ) -> None:
        raise NotImplementedError

    def step(self) -> float | None:
        """Sends one batch. As :data:`celery_durable.scheduling.loop.Step`: None, or seconds until a row is due."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the producer. What Kafka has not acknowledged stays in the outbox."""
        raise NotImplementedError
