"""Sends Celery's events, and asks workers how long they live: through one held connection, for one thread."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from celery_durable.crashpoints import crashpoint
from celery_durable.monitoring.event_words import Event
from celery_durable.monitoring.unproven import Life

if TYPE_CHECKING:
    from celery import Celery

ANSWER_S = 1.0
"""How long workers may take to answer."""


class EventBroker:
    """Raises whatever the transport raises; :meth:`close` it then."""

    def __init__(self, app: Celery, client: str) -> None:
        self._app = app
        self._client = client
        self._connection: Any = None
        self._dispatcher: Any = None

    def send(self, event: Event) -> None:
        """Sends the event, and that its sender is gone where it is."""
        self._publish(event)
        if event.gone:
            self._publish(Event("worker-offline", {}, event.worker))

    def lives(self, workers: Sequence[str]) -> dict[str, Life]:
        """What each of these workers says of itself, as far as it answers in time."""
        self._connect()
        asked = self._app.control.inspect(destination=list(workers), timeout=ANSWER_S, connection=self._connection)
        active = asked.active(safe=True) or {}
        if not active:
            return {}
        return {
            name: Life(float(stats["uptime"]), frozenset(request["id"] for request in active[name]))
            for name, stats in (asked.stats() or {}).items()
            if name in active
        }

    def any_worker(self) -> str | None:
        """A worker that answers; None: none does in time."""
        self._connect()
        asked = self._app.control.inspect(timeout=ANSWER_S, limit=1, connection=self._connection)
        return next(iter(asked.ping() or {}), None)

    def close(self) -> None:
        """Drops the connection."""
        connection, self._connection, self._dispatcher = self._connection, None, None
        if connection is not None:
            with suppress(Exception):
                connection.collect(socket_timeout=0.5)

    def _connect(self) -> None:
        if self._dispatcher is None:
            # Else a broker that went away is waited for without an end.
            self._connection = self._app.connection_for_write(transport_options={"max_retries": 1})
            self._connection.connect()
            self._dispatcher = self._app.events.Dispatcher(self._connection, buffer_while_offline=False)

    def _publish(self, event: Event) -> None:
        self._connect()
        self._dispatcher.hostname = event.worker or self._client
        crashpoint("events.message", "before_publish")
        self._dispatcher.send(event.type, retry=False, **event.fields)
        crashpoint("events.message", "after_publish")
