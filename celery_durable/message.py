"""A Celery message as Celery itself would send it, caught before it leaves: what an operation's row keeps.

Celery's own routing, signals, headers and serialisation make it; only the publishing is left out, so it works with
the broker and the result backend down (cases C19 and C24).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from celery_durable.call_options import SECONDS_MAX, check_options, check_values
from celery_durable.errors import EnqueueError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery import Task

ATTEMPT_HEADER = "durable_attempt"
"""Message header with the attempt's number: the worker may start exactly this attempt."""
GENERATION_HEADER = "durable_generation"
"""Message header with the operation's generation."""
RUN_HEADER = "durable_run"
"""Put into the request, never into a message, by the worker's main process: the run token of this attempt."""
OUR_HEADERS = (ATTEMPT_HEADER, GENERATION_HEADER, RUN_HEADER)
"""Celery copies headers into retries and callbacks: these are stripped wherever a message is caught."""
WITHOUT_LINKS = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
"""The third part of a message's body, where the call has none of these."""
_WITHOUT_LINKS_JSON = f", {json.dumps(WITHOUT_LINKS)}]".encode()
_SCALARS = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class CapturedMessage:
    """One message, serialised. Delivery sends it with::

    producer.publish(body, content_type=content_type, content_encoding=content_encoding,
                     headers={**headers, ATTEMPT_HEADER: attempt, GENERATION_HEADER: generation},
                     declare=[app.amqp.queues[queue]] where that is a queue, **properties, **publish)
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
    """exchange, routing_key, compression, delivery_mode, priority: JSON-able keyword arguments of ``publish``."""
    queue: str
    """The Celery queue's name, for the cap on operations that were sent and not started; the routing key where the
    caller gave an exchange of its own."""
    eta_delay_ms: int | None
    """Delay until it is due, from now (ETA and countdown), or None. The ETA itself is not in ``headers``."""
    expires_delay_ms: int | None
    """Delay until it expires, from now, or None. Not in ``headers`` either: SQL expires it by the database's clock."""
    priority: int
    retries: int
    eta_at_ms: int | None = None
    """The ETA in Unix ms where the caller gave a point in time: no host's clock comes into it."""
    expires_at_ms: int | None = None
    """The same for ``expires``."""


def capture(
    task: Task,
    args: tuple[Any, ...] | None,
    kwargs: dict[str, Any] | None,
    *,
    send: Callable[..., Any],
    **options: Any,
) -> CapturedMessage:
    """Builds the message of ``task.apply_async(args, kwargs, **options)`` without sending it.

    :param send: Celery's own ``apply_async``, which builds and publishes it.
    :raises EnqueueError: an argument that cannot be serialised, or an option that an operation cannot carry.
    """
    options = check_options(task, options)
    now = datetime.now(UTC)
    eta_delay_ms, eta_at_ms = due(task, options.pop("countdown", None), options.pop("eta", None), now)
    # The exec options hold what the task itself declares; None given by the caller takes it away.
    expires = options.pop("expires", exec_option(task, "expires"))
    expires_delay_ms, expires_at_ms = _moment(task, "expires", expires, now)
    retries = options.get("retries") or 0
    recorder = _Recorder(task, options.pop("ignore_result", None))
    # ignore_result keeps send_task from asking the result backend; the recorder writes the real one.
    given: dict[str, Any] = {
        **options,
        "producer": recorder,
        "retry": False,
        "ignore_result": True,
        "add_to_parent": False,
        "expires": None,
    }
    send(args, kwargs, **given)
    return recorder.captured(eta_delay_ms, eta_at_ms, expires_delay_ms, expires_at_ms, int(retries))


class NoProducer:
    """Stands where Celery expects a producer, for what publishes nothing: no connection is made for it."""

    serializer: str | None = None


class _Recorder(NoProducer):
    """Keeps the first message that is published through it."""

    def __init__(self, task: Task, ignore_result: bool | None) -> None:
        self._task = task
        self._ignore_result = bool(task.ignore_result if ignore_result is None else ignore_result)
        self._message: tuple[Any, dict[str, Any]] | None = None
        self.connection = self

    @contextmanager
    def _reraise_as_library_errors(self) -> Iterator[None]:
        yield

    def publish(self, body: Any, **options: Any) -> None:
        """Keeps the message. A second one is the ``task-sent`` event, which the dispatcher has no use for."""
        if self._message is None:
            self._message = (body, options)

    def captured(
        self,
        eta_delay_ms: int | None,
        eta_at_ms: int | None,
        expires_delay_ms: int | None,
        expires_at_ms: int | None,
        retries: int,
    ) -> CapturedMessage:
        """The message as a row keeps it."""
        if self._message is None:
            raise EnqueueError(f"{self._task.name}: an override of apply_async did not call super().apply_async()")
        body, options = self._message
        name = self._task.name
        serializer = options.pop("serializer", None) or self._task.app.conf.task_serializer
        headers = {key: value for key, value in options.pop("headers").items() if key not in OUR_HEADERS}
        if "id" not in headers:
            raise EnqueueError("task_protocol = 1: operations need headers; set task_protocol = 2")
        headers["ignore_result"] = self._ignore_result
        for dropped in ("retry", "retry_policy", "timeout", "confirm_timeout"):
            options.pop(dropped, None)
        exchange, declare = options.pop("exchange", None), options.pop("declare", None)
        publish: dict[str, Any] = {
            "exchange": getattr(exchange, "name", exchange) or "",
            **{
                key: options.pop(key)
                for key in ("routing_key", "compression", "delivery_mode", "priority")
                if key in options
            },
        }
        publish = {key: value for key, value in publish.items() if value is not None}
        properties = {key: value for key, value in options.items() if value is not None}
        check_values(name, {**publish, **properties})
        _require_json(name, headers, "headers")
        _require_json(name, properties, "")
        _require_json(name, publish, "")
        content_type, content_encoding, data = serialise(name, body, serializer)
        return CapturedMessage(
            id=headers["id"],
            task=name,
            body=data,
            content_type=content_type,
            content_encoding=content_encoding,
            digest=digest(name, body[0], body[1], data),
            headers=headers,
            properties=properties,
            publish=publish,
            queue=str(declare[0].name if declare else publish.get("routing_key") or publish["exchange"]),
            eta_delay_ms=eta_delay_ms,
            expires_delay_ms=expires_delay_ms,
            priority=publish.get("priority") or 0,
            retries=retries,
            eta_at_ms=eta_at_ms,
            expires_at_ms=expires_at_ms,
        )


def digest(task: str, args: Any, kwargs: Any, data: bytes) -> str:
    """Of the task's name and arguments: the same for equal arguments, whatever the order of their dictionaries' keys.

    :param data: the serialised body: canonical for plain positional arguments, which have no keys to sort, and standing
        in for arguments that JSON cannot write.
    """
    from kombu.utils.json import dumps

    if not kwargs and data.endswith(_WITHOUT_LINKS_JSON) and all(type(one) in _SCALARS for one in args):
        canonical = data.removesuffix(_WITHOUT_LINKS_JSON) + b"]"
    else:
        try:
            canonical = dumps([list(args), kwargs], sort_keys=True).encode("utf-8", "surrogatepass")
        except Exception:  # noqa: BLE001 - whatever a user's type raises, its serialised form remains
            canonical = data
    return hashlib.sha256(task.encode() + b"\0" + canonical).hexdigest()


def exec_option(task: Task, name: str) -> Any:
    """What Celery's own ``apply_async`` starts from: the option as the task itself declares it."""
    return task._get_exec_options().get(name)


def due(task: Task, countdown: Any, eta: Any, now: datetime) -> tuple[int | None, int | None]:
    """(delay from now in ms, the point in time in Unix ms if one is given); None: at once.

    :raises EnqueueError: both are given, or one is no time.
    """
    if countdown is not None and eta is not None:
        raise EnqueueError(f"{task.name}: countdown = {countdown!r:.100} and eta = {eta!r:.100}: give one of them")
    if countdown is not None:
        delay_ms, _ = _moment(task, "countdown", countdown, now)
        return delay_ms or None, None
    if isinstance(eta, int | float | timedelta):
        raise EnqueueError(f"{task.name}: eta = {eta!r:.100}: give a datetime, or countdown in seconds")
    return _moment(task, "eta", eta, now)


def _moment(task: Task, field: str, value: Any, now: datetime) -> tuple[int | None, int | None]:
    """(delay from now in ms, the point in time in Unix ms if that is what was given)."""
    from celery.utils.time import maybe_make_aware

    if value is None:
        return None, None
    at = value
    if isinstance(at, str):
        try:
            at = datetime.fromisoformat(at)
        except ValueError:
            raise EnqueueError(f"{task.name}: {field} = {value!r:.100}: not an ISO 8601 time") from None
    if isinstance(at, datetime):
        at = maybe_make_aware(at, task.app.timezone)
        delay_s = (at - now).total_seconds()
        at_ms: int | None = round(at.timestamp() * 1000)
    elif isinstance(at, timedelta):
        delay_s, at_ms = at.total_seconds(), None
    elif isinstance(at, int | float) and not isinstance(at, bool):
        delay_s, at_ms = _float(at), None
    else:
        raise EnqueueError(f"{task.name}: {field} = {value!r:.100}: give seconds or a datetime")
    if at_ms is None and not delay_s >= 0:
        raise EnqueueError(f"{task.name}: {field} = {value!r:.100}: give 0 or more seconds")
    if delay_s > SECONDS_MAX:
        raise EnqueueError(f"{task.name}: {field} = {value!r:.100}: further off than ten years")
    return max(0, math.ceil(delay_s * 1000)), at_ms


def _float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf


def serialise(task: str, body: Any, serializer: str) -> tuple[str, str, bytes]:
    """(content type, content encoding, bytes) of a message's body.

    :raises EnqueueError: it cannot be serialised.
    """
    from kombu.serialization import dumps

    try:
        content_type, content_encoding, data = dumps(body, serializer=serializer)
    except Exception as error:
        raise EnqueueError(
            f"{task}: its arguments, links or chain cannot be serialised by {serializer!r} ({type(error).__name__}: "
            f"{error!s:.200}); give simpler ones, or another serializer"
        ) from error
    return content_type, content_encoding, data.encode(content_encoding) if isinstance(data, str) else bytes(data)


def _require_json(task: str, values: Mapping[str, Any], where: str) -> None:
    try:
        json.dumps(values, allow_nan=False)
    except (TypeError, ValueError):
        for name, value in values.items():
            try:
                json.dumps({name: value}, allow_nan=False)
            except (TypeError, ValueError) as error:
                field = f"{where}[{name!r}]" if where else name
                raise EnqueueError(
                    f"{task}: {field} = {value!r:.100}: {error}; an operation keeps it as JSON: give text, whole or "
                    "finite numbers, lists, dictionaries"
                ) from None
        raise
