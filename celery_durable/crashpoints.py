"""Named places where a process may die: at each commit, publish and acknowledgement.

Production code names the place; tests arm a hook there, which ends the process or raises. Unarmed, a crash point
costs one comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

Moment = Literal[
    "before_commit", "after_commit", "before_publish", "after_publish", "before_acknowledge", "after_acknowledge"
]
Hook = Callable[[str], None]
"""Called with ``<place>.<moment>``; it may raise, or not return at all."""

_hook: Hook | None = None


def crashpoint(place: str, moment: Moment) -> None:
    """Does nothing, unless a hook is armed."""
    if _hook is not None:
        _hook(f"{place}.{moment}")


def arm(hook: Hook | None) -> None:
    """Has every crash point of this process call ``hook``; None disarms them. For tests."""
    global _hook  # noqa: PLW0603 - one process, one hook
    _hook = hook
