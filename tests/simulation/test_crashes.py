"""The simulation crashes at each crash point."""

from __future__ import annotations

from celery_durable.crashpoints import POINTS
from tests.simulation import crashes


def test_what_is_rare_are_crash_points():
    assert {crashes.place_of(point) for point in crashes.RARE} == set(crashes._RARE_PLACES)
    assert set(crashes._CHANCES) <= {*crashes.RARE, *crashes._RARE_PLACES}, "a chance of what is not rare"


def test_what_was_never_crashed_at_is_told():
    """The end of 1,000 seeds fails by it."""
    assert crashes.missed(set()) == list(POINTS)
    assert crashes.missed(set(POINTS[1:])) == [POINTS[0]]
