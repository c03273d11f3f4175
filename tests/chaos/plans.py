"""How operations of a chaos run are to go, and the limits that their accounts' names say."""

from __future__ import annotations

from dataclasses import dataclass

from celery_durable.store.schema import CANCELLED, FAILED, SUCCEEDED

RETRIES = 2


@dataclass(frozen=True)
class Plan:
    """What becomes of an operation if nothing is lost."""

    state: str
    ends: tuple[str, ...]
    """How its bodies end, one after the other; what a fault ended is made again and not counted."""
    cut_short: bool = False
    """Fewer bodies may run, and the last may end in any way: from outside, or by too many losses."""


PLANS = {
    "succeed": Plan(SUCCEEDED, ("returned",)),
    "fail": Plan(FAILED, ("failed",)),
    "retry": Plan(SUCCEEDED, (*["retry"] * RETRIES, "returned")),
    "requeue": Plan(SUCCEEDED, ("retry", "returned")),
    "die": Plan(FAILED, ("died", "died"), cut_short=True),
    "cancel": Plan(CANCELLED, ("aborted",), cut_short=True),
}

FRESH, WARM, PLAIN = "fresh", "warm", "plain"
LANES = (FRESH, WARM, PLAIN)
"""Probes: an operation on an account that nobody has seen, on an account with a lease, and without an account."""


def limited(name: str, limit: int) -> str:
    """The name of an account or a group with a limit."""
    return f"{name}~{limit}"


def limit_of(name: str) -> int:
    """The limit that the name says."""
    return int(name.rpartition("~")[2])


def lane_of(account: str) -> str | None:
    """The lane of the probe that uses the account; None: the account is no probe's."""
    if not account:
        return PLAIN
    name = account.partition(":")[0]
    return name if name in LANES else None
