"""Virtual time, and the patches that put it and the seed's random numbers in place of what production code uses.

Each database has a clock of its own, which may be a month off; within one it is right, as the rules say. A process's
monotonic clock runs at a rate of its own. Whatever would sleep or wait for a socket only adds to
:attr:`Clock.slept_s` of the step at hand.
"""

from __future__ import annotations

import random
import sys
import time as real_time
import uuid as real_uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

from celery_durable.store import clock as store_clock

SQL_NOW = "simulated_now_ms()"
START_MS = 1_700_000_000_000


class Clock:
    """The time of one run."""

    def __init__(self) -> None:
        self.now_ms = START_MS
        self.slept_s = 0.0
        """How long the step at hand has slept and waited."""
        self.rate = 1.0
        """How fast the monotonic clock of the process at work runs."""

    def monotonic(self) -> float:
        """The monotonic clock of the process at work, in seconds."""
        return ((self.now_ms - START_MS) / 1000 + self.slept_s) * self.rate

    def sleep(self, seconds: float) -> None:
        """Waits, in virtual time."""
        self.slept_s += max(0.0, seconds)


class _Current:
    """What the patched modules see: the run at hand, exchanged from seed to seed without patching anew."""

    clock = Clock()
    rng = random.Random(0)


def use(clock: Clock, rng: random.Random) -> None:
    """Makes this run's clock and random numbers those of production code."""
    _Current.clock, _Current.rng = clock, rng


def sql_now_ms() -> int:
    """The clock of a database that is right."""
    return _Current.clock.now_ms


def _uuid4() -> real_uuid.UUID:
    return real_uuid.UUID(int=_Current.rng.getrandbits(128), version=4)


def _monotonic() -> float:
    return _Current.clock.monotonic()


def _sleep(seconds: float) -> None:
    _Current.clock.sleep(seconds)


_TIME = SimpleNamespace(monotonic=_monotonic, sleep=_sleep)
_UUID = SimpleNamespace(uuid4=_uuid4, UUID=real_uuid.UUID)


@contextmanager
def virtual_time() -> Iterator[None]:
    """Production code sees virtual time and seeded UUIDs meanwhile; so do statements compiled for the first time."""
    with ExitStack() as stack:
        stack.enter_context(patch.dict(store_clock.NOW_MS_SQL, {"sqlite": SQL_NOW}))
        for module in _production_modules():
            if module.__dict__.get("time") is real_time:
                stack.enter_context(patch.object(module, "time", _TIME))
            if module.__dict__.get("uuid") is real_uuid:
                stack.enter_context(patch.object(module, "uuid", _UUID))
        yield


def _production_modules() -> list[ModuleType]:
    return [
        module
        for name, module in sorted(sys.modules.items())
        if name.partition(".")[0] in {"celery_durable", "holder_service"}
    ]
