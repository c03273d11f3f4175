"""The one formula that both sides share: how many permits one client may come to hold in one group."""

from __future__ import annotations


def reach(in_use: int, claimed: int, permits: int, claims: int | None) -> int:
    """How many may be in use at most, from ``in_use`` on, under a level ``permits`` and a ceiling ``claims``.

    What is in use stays; claims go on while in use is below ``permits`` and ``claimed`` below ``claims`` (none: no
    ceiling).
    """
    top = permits if permits > in_use else in_use
    if claims is None:
        return top
    left = claims - claimed
    return min(top, in_use + left if left > 0 else in_use)
