"""How results and exceptions are kept in an operation's row: as the app's result serializer writes them, bounded.

The worker encodes when it settles, every reader decodes: both go through here, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from celery.backends.base import Backend, compress_payload, decompress_payload
from celery.exceptions import WorkerLostError
from celery.utils.serialization import (
    UnpickleableExceptionWrapper,
    get_pickled_exception,
)
from kombu.exceptions import EncodeError
from kombu.serialization import dumps, loads
from kombu.utils.encoding import ensure_bytes

from celery_durable.store.attempts import Ending

if TYPE_CHECKING:
    from celery import Celery

_ATTRIBUTE = "_celery_durable_codec"
_CUT = "… (cut)"


@dataclass(frozen=True, slots=True)
class Encoded:
    """A value as the columns ``result_content_type``, ``result_content_encoding`` and ``result`` keep it."""

    content_type: str
    content_encoding: str
    data: bytes


class _Codec(Backend):
    """Celery's own rules for results (``result_serializer``, ``result_compression``, accepted content), no storage."""

    supports_result_compression = True
    supports_failure_expires = True


def _codec(app: Celery) -> Any:
    codec = getattr(app, _ATTRIBUTE, None)
    if codec is None:
        codec = _Codec(app)
        setattr(app, _ATTRIBUTE, codec)
    return codec


def encode_result(app: Celery, value: Any, task: str) -> Encoded:
    """A task's return value, encoded by the app's ``result_serializer`` (and ``result_compression``).

    :param task: the task's name, for the error.
    :raises kombu.exceptions.EncodeError: the value cannot be serialised (a terminal failure, case C10).
    """
    codec = _codec(app)
    try:
        return _dump(codec, codec.prepare_value(value))
    except EncodeError as error:
        raise EncodeError(
            f"{task}: its result, of type {type(value).__qualname__}, cannot be serialised by result_serializer = "
            f"{codec.serializer!r} ({bound_text(_safe_str(error), bytes_max=300)}): return what it can serialise, or "
            "set another result_serializer, or ignore_result=True on the task"
        ) from error


def encode_exception(app: Celery, exception: BaseException, *, bytes_max: int) -> Encoded:
    """An exception, encoded as Celery's backends do, in about ``bytes_max`` bytes at most.

    Never raises: an exception that cannot be serialised, or is too large, keeps its real type's name and a bounded
    text (case C10).
    """
    codec = _codec(app)
    try:
        if not _surely_longer(exception, bytes_max):
            encoded = _dump(codec, _prepared(codec, exception))
            if len(encoded.data) <= bytes_max:
                return encoded
    except Exception:  # noqa: BLE001, S110 - the exception's own __reduce__, __repr__ or args may raise anything
        pass
    try:
        return _dump(codec, _bounded(codec, exception, bytes_max))
    except Exception:  # noqa: BLE001 - as above; the last resort holds nothing but strings
        text = (error_text(exception, bytes_max=max(1, bytes_max // 4)),)
        kind = type(exception)
        return _dump(codec, {"exc_type": kind.__qualname__, "exc_message": text, "exc_module": kind.__module__})


def decode_result(app: Celery, encoded: Encoded, *, failed: bool) -> Any:
    """What :func:`encode_result`, or with ``failed`` :func:`encode_exception`, has encoded.

    :raises kombu.exceptions.ContentDisallowed: the app does not accept the content type it was stored with.
    """
    codec = _codec(app)
    value = loads(
        decompress_payload(encoded.data),
        content_type=encoded.content_type,
        content_encoding=encoded.content_encoding,
        accept=codec.accept,
    )
    if not failed:
        return value
    if isinstance(value, BaseException):
        return get_pickled_exception(value)
    return codec.exception_to_python(value)


def failure(app: Celery, exception: BaseException, traceback: str | None, *, bytes_max: int) -> Ending:
    """What a failed attempt leaves in its operation's row: the exception encoded, and texts. Never raises."""
    encoded = encode_exception(app, exception, bytes_max=bytes_max)
    return Ending(
        encoded.content_type,
        encoded.content_encoding,
        encoded.data,
        error=error_text(exception, bytes_max=bytes_max),
        traceback=bound_text(str(traceback), bytes_max=bytes_max) if traceback else None,
    )


def loss_encoder(app: Celery, *, bytes_max: int) -> Callable[[str], Ending]:
    """Makes of a text what an attempt leaves that was lost with its worker: Celery's ``WorkerLostError``."""
    return lambda text: failure(app, WorkerLostError(text), None, bytes_max=bytes_max)


def error_text(exception: BaseException, *, bytes_max: int) -> str:
    """``Type: message`` for people, in at most ``bytes_max`` bytes of UTF-8. Never raises."""
    kind = type(exception)
    if isinstance(exception, UnpickleableExceptionWrapper):
        return bound_text(f"{exception.exc_cls_name}: {exception.text}", bytes_max=bytes_max)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return bound_text(f"{name}: {_safe_str(exception)}", bytes_max=bytes_max)


def bound_text(text: str, *, bytes_max: int) -> str:
    """The text as a database keeps it: without NUL and lone surrogates, its middle cut where it is too long.

    An error's end tells as much as its beginning, a traceback's end tells most: both are kept.
    """
    data = text.replace("\0", "\ufffd").encode("utf-8", "backslashreplace")
    if len(data) <= bytes_max:
        return data.decode()
    room = bytes_max - len(_CUT.encode())
    if room <= 0:
        return data[:bytes_max].decode("utf-8", "ignore")
    head, tail = data[: room // 2], data[len(data) - (room - room // 2) :]
    return head.decode("utf-8", "ignore") + _CUT + tail.decode("utf-8", "ignore")


def _dump(codec: Any, value: Any) -> Encoded:
    content_type, content_encoding, payload = dumps(value, serializer=codec.serializer)
    data = ensure_bytes(payload)
    if codec.compression:
        data = compress_payload(payload, codec.compression)
    return Encoded(content_type, content_encoding, data)


def _prepared(codec: Any, exception: BaseException) -> Any:
    if isinstance(exception, UnpickleableExceptionWrapper) and codec.serializer != "pickle":
        # A prefork child wraps what it cannot send to the main process: keep the real name, not the wrapper's.
        names = {"exc_type": exception.exc_cls_name, "exc_module": exception.exc_module}
        return {**names, "exc_message": [_safe_str(argument) for argument in exception.exc_args]}
    return codec.prepare_exception(exception)


def _surely_longer(exception: BaseException, bytes_max: int) -> bool:
    """Spares the time to encode a text of megabytes, which some serializers take seconds for."""
    texts = (argument for argument in getattr(exception, "args", ()) if isinstance(argument, str | bytes))
    return any(len(text) > bytes_max for text in texts)


def _bounded(codec: Any, exception: BaseException, bytes_max: int) -> Any:
    arguments = tuple(getattr(exception, "args", ()))
    # A quarter: JSON may write one character of a text as an escape of up to six bytes.
    share = max(16, bytes_max // (4 * max(1, len(arguments))))
    texts = [_bound_argument(argument, share) for argument in arguments[: max(1, bytes_max // 64)]]
    kind = type(exception)
    if codec.serializer == "pickle":
        text = error_text(exception, bytes_max=max(1, bytes_max // 4))
        return UnpickleableExceptionWrapper(kind.__module__, kind.__qualname__, texts, text)
    return {"exc_type": kind.__qualname__, "exc_message": texts, "exc_module": kind.__module__}


def _bound_argument(argument: Any, bytes_max: int) -> Any:
    if argument is None or isinstance(argument, bool | float):
        return argument
    return bound_text(argument if isinstance(argument, str) else _safe_str(argument), bytes_max=bytes_max)


def _safe_str(value: Any) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - a user's __str__
        return f"<{type(value).__qualname__} whose text cannot be made>"
