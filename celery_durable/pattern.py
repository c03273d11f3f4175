"""What the messages of one task have in common: learnt from one that Celery built, filled in for the calls after it.

Building a message takes Celery longer than writing it takes PostgreSQL. All that may make one call's message differ
from another's is either filled in here, or has the call take the whole way through Celery: signals with receivers,
routers that are code, a parent task, patched or overridden functions, and every option but :data:`_CONSTANTS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import celery
from celery import Task, signals
from celery.app.amqp import AMQP
from celery.app.routes import MapRoute
from celery.utils.saferepr import saferepr

from celery_durable import message
from celery_durable.call_options import check_values
from celery_durable.message import CapturedMessage

if TYPE_CHECKING:
    from types import FunctionType

_CONSTANTS: Mapping[str, tuple[type, ...]] = {
    "queue": (str,),
    "exchange": (str,),
    "routing_key": (str,),
    "priority": (int,),
    "serializer": (str,),
    "compression": (str,),
    "ignore_result": (bool,),
    "time_limit": (int, float),
    "soft_time_limit": (int, float),
}
"""Options that go into the message as they are. Types are exact: True is no priority, though it equals 1."""
_MEAN_NOTHING_AS_NONE = frozenset(("link", "link_error", "shadow", "producer", "countdown", "eta"))
_PATTERNS_MAX = 100
"""Of one task: priorities and queues, in their combinations."""
_FILLED_IN = frozenset(("id", "root_id", "argsrepr", "kwargsrepr"))
_SHORT = 8
"""So many numbers are shorter than Celery's limit of a representation."""
_CELERY = Path(celery.__file__).parent


@dataclass(frozen=True, slots=True)
class _Pattern:
    surroundings: tuple[Any, ...]
    captured: CapturedMessage
    serializer: str
    queue: Any
    repr_levels: int


class Patterns:
    """One task's."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._known: dict[tuple[Any, ...], _Pattern] = {}

    def capture(
        self,
        args: tuple[Any, ...] | None,
        kwargs: dict[str, Any] | None,
        *,
        send: Callable[..., Any],
        task_id: str,
        **options: Any,
    ) -> CapturedMessage:
        """As :func:`celery_durable.message.capture`, which builds the first of a kind."""
        kind = _kind_of(options)
        surroundings = None if kind is None else self._surroundings(send)
        if kind is None or surroundings is None:
            return message.capture(self._task, args, kwargs, send=send, task_id=task_id, **options)
        countdown = options.get("countdown")
        pattern = self._known.get(kind)
        if pattern is not None and self._holds(pattern, surroundings):
            return self._fill(pattern, args or (), kwargs or {}, task_id, countdown)
        captured = message.capture(self._task, args, kwargs, send=send, task_id=task_id, **options)
        if len(self._known) < _PATTERNS_MAX or kind in self._known:
            pattern = self._pattern_of(captured, surroundings, options)
            if pattern is not None and self._fill(pattern, args or (), kwargs or {}, task_id, countdown) == captured:
                self._known[kind] = pattern
        return captured

    def _surroundings(self, send: Callable[..., Any]) -> tuple[Any, ...] | None:
        """What a message depends on besides its call, as far as it may change; None: nobody can tell."""
        app = self._task.app
        if (
            signals.before_task_publish.receivers
            or signals.after_task_publish.receivers
            or signals.task_sent.receivers
            or app.current_worker_task is not None
        ):
            return None
        amqp = app.amqp
        functions = (_function(send), _function(app.send_task), amqp.as_task_v2.__func__, amqp.send_task_message)
        task = self._task
        return os.getpid(), amqp, amqp.router, task.ignore_result, task.time_limit, task.soft_time_limit, functions

    def _holds(self, pattern: _Pattern, surroundings: tuple[Any, ...]) -> bool:
        return (
            pattern.surroundings == surroundings
            and self._task.app.amqp.queues.get(pattern.captured.queue) is pattern.queue
        )

    def _pattern_of(
        self, captured: CapturedMessage, surroundings: tuple[Any, ...], options: dict[str, Any]
    ) -> _Pattern | None:
        """None: code that is not Celery's own may have had a part in it."""
        task, app = self._task, self._task.app
        amqp = app.amqp
        if not (
            type(amqp) is AMQP
            and all(_is_celerys(function) for function in surroundings[-1])
            and type(task).shadow_name is Task.shadow_name
            and task._dump_pydantic_arguments is None
            and all(type(route) is MapRoute for route in amqp.routes)
        ):
            return None
        headers = {name: value for name, value in captured.headers.items() if name not in _FILLED_IN}
        serializer = options.get("serializer") or message.exec_option(task, "serializer") or app.conf.task_serializer
        queue, levels = amqp.queues.get(captured.queue), app.conf.task_repr_maxlevels
        return _Pattern(surroundings, replace(captured, headers=headers, body=b""), serializer, queue, levels)

    def _fill(
        self, pattern: _Pattern, args: tuple[Any, ...], kwargs: dict[str, Any], task_id: str, countdown: Any
    ) -> CapturedMessage:
        task, of = self._task, pattern.captured
        check_values(task.name, {"task_id": task_id})
        check_arguments = getattr(task, "__header__", None)  # as Celery: a task that is a class has none
        if task.typing and check_arguments is not None:
            check_arguments(*args, **kwargs)
        delay_ms, _ = message.due(task, countdown, None, datetime.now(UTC))
        amqp, levels = task.app.amqp, pattern.repr_levels
        content_type, content_encoding, body = message.serialise(
            task.name, (args, kwargs, message.WITHOUT_LINKS), pattern.serializer
        )
        return CapturedMessage(
            id=task_id,
            task=of.task,
            body=body,
            content_type=content_type,
            content_encoding=content_encoding,
            digest=message.digest(of.task, args, kwargs, body),
            headers={
                **of.headers,
                "id": task_id,
                "root_id": task_id,
                "argsrepr": _repr(args, amqp.argsrepr_maxsize, levels),
                "kwargsrepr": _repr(kwargs, amqp.kwargsrepr_maxsize, levels),
            },
            properties={**of.properties, "correlation_id": task_id, "reply_to": task.app.thread_oid},
            publish=of.publish,
            queue=of.queue,
            eta_delay_ms=delay_ms,
            expires_delay_ms=of.expires_delay_ms,
            priority=of.priority,
            retries=of.retries,
        )


def _kind_of(options: dict[str, Any]) -> tuple[Any, ...] | None:
    """What distinguishes the messages of calls with other options; None: they take the whole way."""
    kind = []
    for name, value in options.items():
        if value is None and name in _MEAN_NOTHING_AS_NONE:
            continue
        if type(value) in _CONSTANTS.get(name, ()):
            kind.append((name, value))
        elif name != "countdown":
            return None
    return tuple(kind)


def _repr(value: tuple[Any, ...] | dict[str, Any], length_max: int, levels: int) -> str:
    """As Celery's ``saferepr``, at once where nothing can be cut or unsafe."""
    if not value or (isinstance(value, tuple) and len(value) <= _SHORT and all(_is_short(one) for one in value)):
        return repr(value)
    return str(saferepr(value, length_max, maxlevels=levels))


def _is_short(value: Any) -> bool:
    return value is None or type(value) in (bool, float) or (type(value) is int and value.bit_length() <= 64)


def _function(method: Any) -> FunctionType:
    function: FunctionType = getattr(method, "__func__", method)
    return function


def _is_celerys(function: Any) -> bool:
    # Not by its name: a wrapper has that too.
    code = getattr(function, "__code__", None)
    return code is not None and Path(code.co_filename).is_relative_to(_CELERY)
