"""A caller that is late at its first call."""

from __future__ import annotations

import time

from benchmarks.systems.sending import timed


def timed_after(pause_s: float, count: int) -> dict[str, int]:
    """Calls nothing, ``count`` times, ``pause_s`` late; also answers when it made its first call."""
    time.sleep(pause_s)
    first_ns = time.monotonic_ns()
    return timed(lambda _: None, count) | {"first_ns": first_ns}
