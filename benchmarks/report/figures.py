"""Medians, percentiles and spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some repetitions, and the two at the ends."""

    median: float
    low: float
    high: float


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` (0 to 1) of all values do not exceed.

    :raises ValueError: there are no values, or ``share`` is no share.
    """
    if not values:
        raise ValueError("no values")
    if not 0 <= share <= 1:
        raise ValueError(f"share = {share}: give 0 to 1")
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * round(share * 1_000_000) // 1_000_000))
    return ordered[rank - 1]


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two in the middle."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def spread(values: Sequence[float]) -> Spread:
    """Median, smallest and largest of the repetitions."""
    return Spread(median(values), min(values), max(values))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """The ratio of each repetition: those of one number were measured one after the other.

    :raises ValueError: not as many of one as of the other, or a zero.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} repetitions against {len(theirs)}")
    if not all(theirs):
        raise ValueError("a figure is 0")
    return [one / other for one, other in zip(ours, theirs, strict=True)]
