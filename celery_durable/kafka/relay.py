"""The relay: sends what is due in an outbox to Kafka, and deletes what Kafka has acknowledged."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from confluent_kafka import KafkaError, KafkaException, Producer
from sqlalchemy import Table

from celery_durable.crashpoints import crashpoint
from celery_durable.kafka import client
from celery_durable.kafka.settings import KafkaSettings
from celery_durable.kafka.throttle import Throttled
from celery_durable.store import outbox as rows
from celery_durable.store.database import Database
from celery_durable.store.outbox import Outgoing

logger = logging.getLogger(__name__)

REPORT_WAIT_S = 0.05
"""How long one step waits for a delivery report, in seconds: rows that become due meanwhile wait as long at most."""
LOOK_AGAIN_S = 0.1
"""Pause after a look that found something due which could not be claimed, in seconds."""
CLOSE_S = 1.0
"""How long :meth:`Relay.close` waits for delivery reports, in seconds."""
_GRACE_MS = 5_000
_BATCHES_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class _InFlight:
    row: Outgoing
    since: float


class Relay:
    """Sends the rows of one outbox, at least once each; several relays may share it.

    Rows are claimed in a short transaction, produced with no lock held, and deleted only for a delivery report that
    says so, only at the version that was sent. An error holds back its own row, by a growing pause; a hung broker
    costs ``kafka_publish_deadline_ms``, and rows for other brokers flow meanwhile. Reordering is harmless (rule 5).
    For one thread.

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
        self._database = database
        self._outbox = outbox
        self._settings = settings
        self._batch_max = batch_max
        self._retry_min_ms = retry_min_ms
        self._retry_max_ms = retry_max_ms
        self._deadline_s = (settings.kafka_publish_deadline_ms + _GRACE_MS / 2) / 1000
        self._producer: Producer | None = None
        self._broken: str | None = None
        self._due_at_s = 0.0
        """When to look again (monotonic), if nothing wakes it: a row is due then that was not when it looked last."""
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._sent: list[Outgoing] = []
        self._not_sent: list[Outgoing] = []
        self._warnings = Throttled(logger)

    def step(self) -> float | None:
        """Sends one batch. As :data:`celery_durable.scheduling.loop.Step`: None, or seconds until a row is due."""
        producer = self._usable_producer()
        self._poll(producer, 0)
        self._send_due(producer)
        if self._in_flight and self._broken is None:
            self._poll(producer, REPORT_WAIT_S)
        self._give_up_overdue()
        self._settle()
        return None if self._in_flight else max(0.0, self._due_at_s - time.monotonic())

    def close(self) -> None:
        """Ends the producer. What Kafka has not acknowledged stays in the outbox."""
        if self._producer is None:
            return
        deadline = time.monotonic() + CLOSE_S
        while self._in_flight and self._broken is None and time.monotonic() < deadline:
            self._poll(self._producer, REPORT_WAIT_S)
        self._retire("closed")
        self._settle()

    def _send_due(self, producer: Producer) -> None:
        """Claims and produces what is due, as far as there is room."""
        room = min(self._batch_max, self._batch_max * _BATCHES_IN_FLIGHT - len(self._in_flight))
        if room <= 0:
            return
        # On SQLite a claim takes the one lock of all writers, even if it finds nothing.
        if self._database.dialect == "sqlite" and not self._is_due():
            return
        hold_ms = self._settings.kafka_publish_deadline_ms + _GRACE_MS
        with self._database.one_write("relay.claim") as connection:
            claimed = rows.claim(connection, self._outbox, limit=room, hold_ms=hold_ms)
        for row in claimed:
            self._produce(producer, row)
        if len(claimed) == room:
            self._due_at_s = 0.0
        elif not claimed:
            self._is_due()

    def _is_due(self) -> bool:
        with self._database.reading() as connection:
            due_ms = rows.due_in_ms(connection, self._outbox)
        # What is due and was not claimed is another relay's, or has become due just now.
        pause_s = float("inf") if due_ms is None else max(LOOK_AGAIN_S, due_ms / 1000)
        self._due_at_s = time.monotonic() + pause_s
        return due_ms is not None and due_ms <= 0

    def _produce(self, producer: Producer, row: Outgoing) -> None:
        self._in_flight[row.no, row.version] = _InFlight(row, time.monotonic())

        def produce() -> None:
            producer.produce(
                row.topic,
                value=row.body,
                key=row.key.encode() or None,
                headers=dict(row.headers) if row.headers else None,
                on_delivery=lambda error, _message: self._on_delivery(row, error),
            )

        crashpoint("relay.message", "before_publish")
        try:
            try:
                produce()
            except BufferError:
                # librdkafka's queue is full: its reports make room.
                self._poll(producer, REPORT_WAIT_S)
                produce()
        except BufferError:
            self._failed(row, "the producer's queue is full")
        except KafkaException as error:
            self._failed(row, error.args[0])
        crashpoint("relay.message", "after_publish")

    def _on_delivery(self, row: Outgoing, error: KafkaError | None) -> None:
        crashpoint("relay.message", "before_acknowledge")
        if error is not None:
            self._failed(row, error)
        elif self._in_flight.pop((row.no, row.version), None) is not None:
            self._sent.append(row)
        crashpoint("relay.message", "after_acknowledge")

    def _failed(self, row: Outgoing, error: KafkaError | str) -> None:
        """Keeps the row: whatever the error says, the message may have been written."""
        if self._in_flight.pop((row.no, row.version), None) is None:
            return
        self._not_sent.append(row)
        if isinstance(error, KafkaError):
            if error.fatal():
                self._broken = error.str()
            if error.code() in (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT):
                return
            kind, reason = error.code(), error.str()
            if kind in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
                reason += "; create it with the command `topics apply`"
        else:
            kind, reason = -1, error
        self._warnings.warning(
            (row.topic, kind), "%s, key %r: not sent, will be sent again: %s", row.topic, row.key[:100], reason
        )

    def _give_up_overdue(self) -> None:
        now = time.monotonic()
        overdue = [f.row for f in self._in_flight.values() if now - f.since > self._deadline_s]
        for row in overdue:
            self._failed(row, "no delivery report within kafka_publish_deadline_ms")

    def _settle(self) -> None:
        """Writes down what the delivery reports said."""
        sent, not_sent = self._sent, self._not_sent
        if not sent and not not_sent:
            return
        with self._database.one_write("relay.settle") as connection:
            rows.delivered(connection, self._outbox, sent)
            rows.failed(
                connection,
                self._outbox,
                not_sent,
                retry_min_ms=self._retry_min_ms,
                retry_max_ms=self._retry_max_ms,
            )
        if not_sent:
            self._due_at_s = 0.0
        self._sent, self._not_sent = [], []

    def _usable_producer(self) -> Producer:
        if self._broken is not None:
            logger.error("the producer is unusable (%s): going on with a new one", self._broken)
            self._retire(self._broken)
        if self._producer is None:
            self._producer = client.make_producer(self._settings)
        return self._producer

    def _poll(self, producer: Producer, timeout_s: float) -> None:
        """Serves delivery reports. The producer raises its own fatal error here, after the rows' reports."""
        try:
            producer.poll(timeout_s)
        except KafkaException as error:
            if not error.args[0].fatal():
                raise
            self._broken = error.args[0].str()

    def _retire(self, reason: str) -> None:
        """Drops the producer. Its unreported rows count as not sent."""
        if self._producer is not None:
            self._producer.purge()
            self._poll(self._producer, 0)
            self._producer = None
        self._broken = None
        for one in list(self._in_flight.values()):
            self._failed(one.row, reason)
