"""A Celery message as Celery itself would send it, caught before it leaves: what an operation's row keeps.

Celery's own routing, signals, headers and serialisation make it; only the publishing is left out, so it works with
the broker and the result backend down (cases C19 and C24).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery import Task

ATTEMPT_HEADER = "durable_attempt"
"""Message header with the attempt's number: the worker may start exactly this attempt."""
GENERATION_HEADER = "durable_generation"
"""Message header with the operation's generation."""
OUR_HEADERS = (ATTEMPT_HEADER, GENERATION_HEADER)
"""Celery copies headers into retries and callbacks: these are stripped wherever a message is caught."""


@dataclass(frozen=True, slots=True)
class CapturedMessage:
    """One message, serialised. Delivery sends it with::

    producer.publish(body, content_type=content_type, content_encoding=content_encoding,
                     headers={**headers, ATTEMPT_HEADER: attempt, GENERATION_HEADER: generation},
                     **properties, **publish)
    """

    id: str
    task: str
    body: bytes
    content_type: str
    content_encoding: str
    digest: str
    """Of the task's name and its arguments alone: what "the same body" means for dedup (case A1)."""
    headers: dict[str, Any]
    properties: dict[str, Any]
    """correlation_id, reply_to, …"""
    publish: dict[str, Any]
    """exchange, routing_key, compression, delivery_mode, priority, …: JSON-able keyword arguments of ``publish``."""
    queue: str
    """The Celery queue's name, for the cap on operations that were sent and not started."""
    eta_delay_ms: int | None
    """Delay until it is due, from now (ETA and countdown), or None. The ETA itself is not in ``headers``."""
    expires_delay_ms: int | None
    priority: int
    retries: int


def capture(task: Task, args: tuple[Any, ...] | None, kwargs: dict[str, Any] | None, **options: Any) -> CapturedMessage:
    """Builds the message of ``task.apply_async(args, kwargs, **options)`` without sending it.

    :raises EnqueueError: an argument that cannot be serialised, or an option that an operation cannot carry.
    """
    raise NotImplementedError
