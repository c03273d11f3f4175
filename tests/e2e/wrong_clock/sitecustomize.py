"""Makes a Python process believe that it is ``WRONG_CLOCK_S`` seconds later: with this folder on ``PYTHONPATH``."""

from __future__ import annotations

import datetime
import os
import time
from typing import Any, Self

_OFFSET_S = float(os.environ.get("WRONG_CLOCK_S", "0"))
_real_time, _real_time_ns, _real = time.time, time.time_ns, datetime.datetime


class _AnyDatetime(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _real)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, _real)


class _Datetime(_real, metaclass=_AnyDatetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Self:
        return cls.fromtimestamp(time.time(), tz)

    @classmethod
    def today(cls) -> Self:
        return cls.now()

    @classmethod
    def utcnow(cls) -> Self:
        return cls.now(datetime.UTC).replace(tzinfo=None)


if _OFFSET_S:
    # Pickled by its name, as the real one is.
    _Datetime.__name__ = _Datetime.__qualname__ = "datetime"
    _Datetime.__module__ = "datetime"
    patched: Any = datetime
    patched.datetime = _Datetime
    time.time = lambda: _real_time() + _OFFSET_S
    time.time_ns = lambda: _real_time_ns() + int(_OFFSET_S * 1e9)
