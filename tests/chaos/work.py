"""The operations that a service enqueues in a chaos run, drawn from the seed alone. Pure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.chaos.plans import limited

SHARED = (limited("shared:one", 1), limited("shared:two", 2), limited("shared:many", 4))
GROUPED = limited("shared:groups", 3)
GROUPS = (limited("wf-1", 1), limited("wf-2", 2))
DOOMED = limited("shared:doomed", 1)
CANCELLED = limited("shared:cancelled", 2)
CANCELLED_BEFORE_S = 120.0
"""What is to be cancelled would run so long."""
LONG_S = (5.5, 7.5)
"""Longer than a heartbeat timeout, for faults to hit."""
LONG_EVERY = 10
"""One of so many is long, by turns without an account and in the service's own of limit 1. So about one runs at any
time, and hardly ever more than two: others find a free worker, and what they wait for is what they are to show."""


@dataclass(frozen=True)
class Work:
    """One call."""

    task: str
    plan: str
    duration_s: float
    account: str = ""
    group: str = ""
    cancel_after_s: float | None = None
    pause_s: float = 0.0
    """How long after it the next one comes."""


def draw_work(seed: int, service: str, *, rate: float) -> Iterator[Work]:
    """The calls of one service, without end.

    :param rate: how many a second.
    """
    rng = random.Random(f"load {seed} {service}")
    for number in itertools.count(1):
        pause_s = rng.expovariate(rate)
        if number % LONG_EVERY == 0:
            task, account = (("plain", ""), ("permit", limited(f"{service}:long", 1)))[number // LONG_EVERY % 2]
            yield Work(task, "succeed", round(rng.uniform(*LONG_S), 2), account, pause_s=pause_s)
        else:
            yield _short(rng, service, pause_s)


def _short(rng: random.Random, service: str, pause_s: float) -> Work:
    plan = rng.choices(("succeed", "fail", "retry", "requeue", "die", "cancel"), (82, 4, 5, 4, 2, 3))[0]
    duration_s = rng.choices((0.05, 0.3, 0.7), (60, 30, 10))[0]
    if plan == "die":
        return Work("die", plan, 0.05, DOOMED, pause_s=pause_s)
    if plan == "cancel":
        after_s = rng.uniform(0, 4)
        return Work("permit", plan, CANCELLED_BEFORE_S, CANCELLED, cancel_after_s=after_s, pause_s=pause_s)
    if rng.random() < 0.3:
        return Work("grouped", plan, duration_s, GROUPED, rng.choice(GROUPS), pause_s=pause_s)
    if rng.random() < 0.1:
        return Work("plain", plan, duration_s, pause_s=pause_s)
    return Work("permit", plan, duration_s, rng.choice((*SHARED, limited(f"{service}:own", 2))), pause_s=pause_s)
