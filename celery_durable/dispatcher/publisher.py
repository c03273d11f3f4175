"""Publishes messages to the Celery broker through one held connection, with a deadline. For one thread."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kombu.common import Broadcast
from kombu.exceptions import BatchPublishError

from celery_durable.crashpoints import crashpoint
from celery_durable.message import ATTEMPT_HEADER, GENERATION_HEADER
from celery_durable.store.delivery import Outbound

if TYPE_CHECKING:
    from celery import Celery

_TIMEOUT_OPTIONS = {"redis": ("socket_timeout", "socket_connect_timeout"), "amqp": ("read_timeout", "write_timeout")}
"""Transport options that bound a call to a broker that hangs, by the transport's ``driver_type``."""


TOGETHER_MAX = 100
"""Messages in one round trip to the broker at most: if it breaks off, so many are sent again."""


class BrokerUnavailable(Exception):
    """The broker cannot be reached or does not answer: no message's own fault."""


class Publisher:
    """Sends operations' messages as Celery would have sent them, their queues declared.

    :param deadline_s: how long the broker may take for one call, where the app's own ``broker_transport_options``
        do not say it.
    """

    def __init__(self, app: Celery, *, deadline_s: float) -> None:
        self._app = app
        self._deadline_s = deadline_s
        self._connection: Any = None
        self._producer: Any = None

    @property
    def together_max(self) -> int:
        """How many messages :meth:`publish` sends in one round trip to the broker that it is connected to."""
        return TOGETHER_MAX if self._producer is not None and self._producer.supports_batch_publish else 1

    def connect(self) -> None:
        """Connects if there is no connection. Raises :class:`BrokerUnavailable`."""
        if self._producer is not None:
            return
        connection = self._connection or self._open()
        self._connection = connection
        try:
            connection.connect()
            self._producer = self._app.amqp.Producer(connection.channel(), auto_declare=False)
        except Exception as error:
            self.close()
            raise BrokerUnavailable(f"the Celery broker cannot be reached: {_text(error)}") from error

    def publish(self, some: Sequence[Outbound]) -> list[tuple[Outbound, Exception]]:
        """Sends up to :attr:`together_max` messages. Needs :meth:`connect` before.

        Returns those that cannot be sent by a fault of their own (case B13), each with its error.

        :raises BrokerUnavailable: the broker is away; any of the messages may or may not have reached it.
        """
        crashpoint("delivery.message", "before_publish")
        failed = self._publish_together(some) if len(some) > 1 else None
        if failed is None:
            failed = self._publish_each(some)
        crashpoint("delivery.message", "after_publish")
        return failed

    def _publish_together(self, some: Sequence[Outbound]) -> list[tuple[Outbound, Exception]] | None:
        """None: the broker refused some of them, and does not say which. Each again, then: a worker starts one once."""
        try:
            with self._producer.batch():
                return self._publish_each(some)
        except BatchPublishError as error:
            cause = error.__cause__
            if cause is not None and self._is_unavailable(cause):
                raise self._unavailable(cause) from error
            return None

    def _publish_each(self, some: Sequence[Outbound]) -> list[tuple[Outbound, Exception]]:
        failed: list[tuple[Outbound, Exception]] = []
        for one in some:
            try:
                self._publish(one)
            except (BrokerUnavailable, BatchPublishError):
                raise
            except Exception as error:  # noqa: BLE001 - the others go on
                failed.append((one, error))
        return failed

    def _publish(self, outbound: Outbound) -> None:
        declare = self._declared(outbound)
        channel_errors = self._connection.channel_errors  # of the connection that this uses: an error may close it
        try:
            self._send(outbound, declare)
        except channel_errors:
            # A broker may answer an earlier message's fault with the next one's error: once more on a new channel.
            channel, self._producer = self._producer.channel, None
            with suppress(Exception):
                channel.close()
            self.connect()
            self._send(outbound, declare)

    def close(self) -> None:
        """Drops the connection."""
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            with suppress(Exception):
                connection.collect(socket_timeout=0.5)

    def _open(self) -> Any:
        connection = self._app.connection_for_write()
        known = connection.transport_options
        names = _TIMEOUT_OPTIONS.get(connection.transport.driver_type, ())
        bounds = {name: self._deadline_s for name in names if known.get(name) is None}
        if not bounds:
            return connection
        return self._app.connection_for_write(transport_options=bounds)

    def _declared(self, outbound: Outbound) -> list[Any]:
        """The queue that the message goes to, as far as that is known: through an exchange of the caller's own it
        goes to whatever is bound there, and a routing key is no queue's name."""
        queues, name = self._app.amqp.queues, outbound.admitted.queue
        if not name or (outbound.publish.get("exchange") and name not in queues):
            return []
        declared = queues[name]
        return [] if isinstance(declared, Broadcast) else [declared]

    def _send(self, outbound: Outbound, declare: list[Any]) -> None:
        headers = {
            **outbound.headers,
            ATTEMPT_HEADER: outbound.admitted.attempt,
            GENERATION_HEADER: outbound.admitted.generation,
        }
        try:
            self._producer.publish(
                outbound.body,
                content_type=outbound.content_type,
                content_encoding=outbound.content_encoding,
                headers=headers,
                declare=declare,
                **{**outbound.properties, **outbound.publish},
            )
        except Exception as error:
            if not self._is_unavailable(error):
                raise
            raise self._unavailable(error) from error

    def _is_unavailable(self, error: BaseException) -> bool:
        return isinstance(error, (*self._connection.connection_errors, OSError))

    def _unavailable(self, error: BaseException) -> BrokerUnavailable:
        self.close()
        return BrokerUnavailable(f"the Celery broker does not answer: {_text(error)}")


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
