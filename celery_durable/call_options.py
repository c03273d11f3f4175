"""The options of one call: which of them an operation carries, and what values they may have.

What is wrong is refused where the call is made. Later it would be found by a dispatcher, a broker or a worker, where no
caller is left to be told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from celery_durable.errors import EnqueueError
from celery_durable.names import nearest

if TYPE_CHECKING:
    from celery import Task

CARRIED = frozenset(
    {
        # Celery's options that shape the message.
        "task_id", "countdown", "eta", "expires", "link", "link_error", "shadow", "add_to_parent", "group_id",
        "group_index", "retries", "chord", "chain", "reply_to", "time_limit", "soft_time_limit", "root_id",
        "parent_id", "route_name", "ignore_result", "replaced_task_nesting", "argsrepr", "kwargsrepr", "origin",
        "stamped_headers",
        # Routing and publishing.
        "queue", "exchange", "exchange_type", "routing_key", "priority", "serializer", "compression",
        "delivery_mode", "headers",
        # Properties that brokers know (kombu passes them on; the last two are Amazon SQS's).
        "app_id", "cluster_id", "message_id", "timestamp", "type", "user_id", "MessageGroupId",
        "MessageDeduplicationId",
    }
)  # fmt: skip
"""Options of ``apply_async`` that an operation carries to the worker as the caller gave them."""

_TRANSPARENT = frozenset({"producer", "redelivered"})
"""Canvas, beat and ``self.retry()`` give these themselves. They say nothing about the message."""

REFUSED: Mapping[str, str] = {
    "connection": "the dispatcher publishes, over the app's own connection: set broker_url",
    "publisher": "the dispatcher publishes, over the app's own connection: set broker_url",
    "router": "set task_routes, or give queue",
    "result_cls": "set the task's AsyncResult method",
    "retry_policy": "delivery repeats until the operation starts: leave it out",
    "retry": "delivery repeats until the operation starts: leave it out",
    "declare": "give queue, and declare it in task_queues",
    "mandatory": "delivery repeats until the operation starts: leave it out",
    "immediate": "delivery repeats until the operation starts: leave it out",
    "timeout": "the settings' publish_deadline_s holds for all deliveries",
    "confirm_timeout": "the settings' publish_deadline_s holds for all deliveries",
    "expiration": "give expires",
    "now": "give eta",
    "timezone": "give eta with its time zone",
    "content_type": "give serializer",
    "content_encoding": "give serializer",
    "task_type": "it is always the task itself",
}
"""Options that a row cannot carry, and what to do instead."""

CELERYS_HEADERS = frozenset(
    {
        "id", "task", "lang", "shadow", "eta", "expires", "group", "group_index", "retries", "timelimit", "root_id",
        "parent_id", "ignore_result", "replaced_task_nesting", "stamped_headers", "stamps",
    }
)  # fmt: skip
"""Celery writes these itself. ``headers`` of the caller would replace them in silence."""

NAME_BYTES_MAX = 255
"""Longest name in AMQP: of a queue, an exchange, a routing key, and of most properties."""
INT_MAX = 2**31 - 1
SECONDS_MAX = 10 * 365 * 86_400
"""Ten years: a longer time is a mistake."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Which values an option may have besides None."""

    allows: Callable[[Any], bool]
    remedy: str


def storable(value: Any) -> bool:
    """Whether it is a text that databases keep: without NUL and half surrogate pairs."""
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_name(value: Any) -> bool:
    return storable(value) and len(value.encode()) <= NAME_BYTES_MAX


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(low: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= INT_MAX


def _is_signature(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("task"), str)


def _are_signatures(value: Any) -> bool:
    items = value if isinstance(value, list | tuple | set | frozenset) else [value]
    return all(item is None or _is_signature(item) for item in items)


def _is_compression(value: Any) -> bool:
    from kombu.compression import get_encoder

    try:
        get_encoder(value)
    except (KeyError, TypeError):
        return False
    return True


def _is_headers(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _are_header_names(value: Any) -> bool:
    return isinstance(value, list | tuple | set | frozenset) and all(isinstance(name, str) for name in value)


_ID = _Kind(lambda value: storable(value) and 0 < len(value) <= 255, "give a text of 1 to 255 characters without NUL")
_TEXT = _Kind(storable, "give a text without NUL")
_NAME = _Kind(_is_name, f"give a name: a text of at most {NAME_BYTES_MAX} bytes without NUL")
_TARGET = _Kind(lambda value: _is_name(getattr(value, "name", value)), _NAME.remedy)
_COUNT = _Kind(_is_whole(0), "give a whole number from 0 up")
_SECONDS = _Kind(
    lambda value: _is_number(value) and math.isfinite(value) and 0 <= value <= SECONDS_MAX, "give seconds from 0 up"
)
_SIGNATURES = _Kind(_are_signatures, "give signatures: task.s(…)")

_KINDS: Mapping[str, _Kind] = {
    "task_id": _ID,
    **dict.fromkeys(("shadow", "group_id", "root_id", "parent_id", "argsrepr", "kwargsrepr", "origin"), _TEXT),
    **dict.fromkeys(("MessageGroupId", "MessageDeduplicationId"), _TEXT),
    **dict.fromkeys(("reply_to", "app_id", "cluster_id", "message_id", "type", "user_id", "routing_key"), _NAME),
    **dict.fromkeys(("route_name", "exchange_type", "serializer"), _NAME),
    **dict.fromkeys(("queue", "exchange"), _TARGET),
    **dict.fromkeys(("retries", "group_index", "replaced_task_nesting", "timestamp"), _COUNT),
    **dict.fromkeys(("time_limit", "soft_time_limit"), _SECONDS),
    **dict.fromkeys(("link", "link_error", "chain", "chord"), _SIGNATURES),
    "priority": _Kind(_is_whole(-INT_MAX), "give a whole number"),
    "delivery_mode": _Kind(
        lambda value: value in (1, 2, "transient", "persistent"), "give 'persistent' or 'transient'"
    ),
    "compression": _Kind(_is_compression, "give the name of a compression that kombu has, for example 'gzip'"),
    "headers": _Kind(_is_headers, "give a dictionary whose keys are texts"),
    "stamped_headers": _Kind(_are_header_names, "give a list of names"),
}


def check_options(task: Task, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that the message carries.

    :raises EnqueueError: one that does not exist, that an operation cannot carry, or that has a wrong value.
    """
    check_values(task.name, {name: value for name, value in options.items() if name in CARRIED})
    stamps: Collection[str] = options.get("stamped_headers") or ()
    for name in stamps:
        if name not in options:
            raise EnqueueError(f"{task.name}: stamped_headers = {stamps!r:.100}: the call has no {name!r}")
    checked = {}
    for name, value in options.items():
        if name in _TRANSPARENT or (name in REFUSED and (value is None or (name == "retry" and value is True))):
            continue
        if name in REFUSED:
            raise EnqueueError(f"{task.name}: {name} = {value!r:.100}: an operation cannot carry it; {REFUSED[name]}")
        if name not in CARRIED and name not in stamps:
            hint = nearest(name, CARRIED | {"account", "group"}, list_all=False)
            raise EnqueueError(
                f"{task.name}: {name} = {value!r:.100}: there is no such option{hint}; data of your own goes into "
                "headers"
            )
        checked[name] = value
    for name in CELERYS_HEADERS.intersection(options.get("headers") or ()):
        raise EnqueueError(
            f"{task.name}: headers[{name!r}]: Celery writes this header itself; give the option, or another name"
        )
    return checked


def check_values(task: str, values: Mapping[str, Any]) -> None:
    """Refuses a wrong value of an option, whether the call gives it, or the task or a route.

    :raises EnqueueError: naming the option, its value and what to give.
    """
    for name, value in values.items():
        kind = _KINDS.get(name)
        if kind is not None and value is not None and not kind.allows(value):
            raise EnqueueError(f"{task}: {name} = {value!r:.100}: {kind.remedy}")
