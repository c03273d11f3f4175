"""The loop that every sender runs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from benchmarks.setting.child import gate
from benchmarks.setting.tally import Tally

IDLE_S = (0.3, 0.5)
"""Pauses between calls to an idle system: longer than any of its own, and not in step with them."""
START_S = 30.0


def timed(send: Callable[[int], object], count: int) -> dict[str, int]:
    """Calls ``send`` with 0 to ``count`` - 1. The clock starts after the first, which opens connections, and when all
    callers have come so far."""
    send(0)
    gate()
    cpu_ns, began_ns = time.process_time_ns(), time.monotonic_ns()
    for number in range(1, count):
        send(number)
    return {"began_ns": began_ns, "ended_ns": time.monotonic_ns(), "timed": count - 1, "start_cpu_ns": cpu_ns}


def steady(send: Callable[[int], object], count: int, interval_s: float, seed: str) -> dict[str, int]:
    """Calls ``send`` with 0 to ``count`` - 1, one every ``interval_s``, a quarter of it early or late, not in step."""
    pauses = random.Random(seed)
    began_s: float | None = None

    def one(number: int) -> None:
        nonlocal began_s
        if number and began_s is None:  # all callers have come so far
            began_s = time.monotonic() - interval_s * (number - 1)
        if began_s is not None:
            due_s = began_s + interval_s * (number + pauses.uniform(-0.25, 0.25))
            time.sleep(max(0.0, due_s - time.monotonic()))
        send(number)

    return timed(one, count)


def paced(send: Callable[[int], object], tally: Tally, count: int, seed: int = 1) -> dict[str, list[float]]:
    """Calls ``send`` with the present time while the system is idle, and waits until the body has run: ``delays_ms``.

    The first five are not counted.
    """
    pauses = random.Random(seed)
    delays_ms = []
    for _ in range(count + 5):
        time.sleep(pauses.uniform(*IDLE_S))
        ran = tally.count
        send(time.monotonic_ns())
        deadline = time.monotonic() + START_S
        while tally.count == ran:
            if time.monotonic() > deadline:
                raise RuntimeError(f"not within {START_S:g} s: a body that an idle system starts")
            time.sleep(0.0005)
        delays_ms.append(tally.delay_ns / 1e6)
    return {"delays_ms": delays_ms[5:]}


def account(number: int, accounts: int) -> str:
    """The account of a call, in turn."""
    return f"tenant:{number % accounts}"
