"""No crash point is left out of the simulation without a reason."""

from __future__ import annotations

from celery_durable.crashpoints import POINTS
from tests.simulation import crashes


def test_every_crash_point_is_crashed_at_or_has_a_reason():
    """A new point is crashed at, unless somebody says why no process of a run passes it."""
    places = {crashes.place_of(point) for point in POINTS}
    assert set(crashes.ELSEWHERE) <= places, "a place that is no more"
    assert {crashes.place_of(point) for point in crashes.RARE} == set(crashes._RARE_PLACES)
    assert {*crashes.REACHED} | {point for point in POINTS if crashes.place_of(point) in crashes.ELSEWHERE} == {*POINTS}
    assert set(crashes._CHANCES) <= {*crashes.RARE, *crashes._RARE_PLACES}, "a chance of what is not rare"
    assert all(crashes.ELSEWHERE.values())


def test_what_was_never_crashed_at_is_told():
    """The end of 1,000 seeds fails by it."""
    assert crashes.missed(set()) == list(crashes.REACHED)
    assert crashes.missed(set(crashes.REACHED[1:])) == [crashes.REACHED[0]]
