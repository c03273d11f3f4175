"""Named places where a process may die: at each commit, publish and acknowledgement.

Production code names the place; tests arm a hook there, which ends the process or raises. Unarmed, a crash point
costs one comparison. A hook that raises before a commit rolls it back; one that raises after it leaves the caller in
doubt whether it happened, as a lost connection does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

Moment = Literal[
    "before_commit", "after_commit", "before_publish", "after_publish", "before_acknowledge", "after_acknowledge"
]
Hook = Callable[[str], None]
"""Called with ``<place>.<moment>``; it may raise, or not return at all."""

COMMITS = (
    "enqueue.one",
    "enqueue.many",
    "commands.stage",
    "results.cancel",
    "results.forget",
    "results.purge",
    "migrate.upgrade",
    "dispatcher.identify",
    "passes.step",
    "replies.apply",
    "replies.restored",
    "delivery.claim",
    "delivery.put_back",
    "recovery.lost",
    "recovery.expire",
    "recovery.promote",
    "telling.claim",
    "telling.told",
    "retention.delete",
    "relay.claim",
    "relay.settle",
    "worker.start",
    "worker.beat",
    "worker.succeed",
    "worker.fail",
    "worker.cancel",
    "worker.revoke",
    "worker.retry",
    "worker.repeat",
    "worker.lose",
    "worker.told",
    "holder.batch",
    "holder.timers",
    "holder.adopt",
    "life.begin",
    "life.new_epoch",
    "rebuild.take",
    "rebuild.limits",
    "rebuild.sweep",
    "rebuild.replay",
    "rebuild.alive",
    "rebuild.finish",
    "rebuild.give_up",
    "go.begin",
    "go.accounts",
)
"""Every transaction and every writing statement in autocommit, in any process."""
PUBLISHES = ("delivery.message", "events.message", "relay.message", "worker.outcome")
"""Every message to the Celery broker or to Kafka, and each outcome that the app's own result backend is told."""
ACKNOWLEDGEMENTS = ("relay.message", "reader.offset", "worker.message")
"""Kafka's delivery report, the witness of what SQL has read of a topic, and the Celery message of an attempt."""

POINTS: tuple[str, ...] = tuple(
    f"{place}.{when}_{what}"
    for what, places in (("commit", COMMITS), ("publish", PUBLISHES), ("acknowledge", ACKNOWLEDGEMENTS))
    for place in places
    for when in ("before", "after")
)
"""Every crash point. Each is called somewhere, and nothing is committed, published or acknowledged outside of them:
a test compares this list with the code."""

_hook: Hook | None = None


def crashpoint(place: str, moment: Moment) -> None:
    """Does nothing, unless a hook is armed."""
    if _hook is not None:
        _hook(f"{place}.{moment}")


def arm(hook: Hook | None) -> None:
    """Has every crash point of this process call ``hook``; None disarms them. For tests."""
    global _hook  # noqa: PLW0603 - one process, one hook
    _hook = hook
