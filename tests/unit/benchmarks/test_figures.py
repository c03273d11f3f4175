"""Statistics of the benchmarks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.report.figures import Spread, median, percentile, ratios, spread

values = st.lists(st.floats(0, 1e9), min_size=1)


def test_percentiles_by_nearest_rank() -> None:
    hundred = [float(number) for number in range(1, 101)]
    assert [percentile(hundred, share) for share in (0, 0.5, 0.99, 1)] == [1, 50, 99, 100]
    assert percentile([7.0], 0.99) == 7
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2


@given(values, st.integers(0, 100))
def test_so_many_values_are_within_a_percentile(some: list[float], percent: int) -> None:
    found = percentile(some, percent / 100)
    within = sum(value <= found for value in some)
    below = sum(value < found for value in some)
    assert within * 100 >= percent * len(some)
    assert below * 100 <= percent * len(some)


@given(values)
def test_the_median_is_in_the_middle(some: list[float]) -> None:
    found = spread(some)
    assert found.low == min(some) <= found.median <= max(some) == found.high
    assert 2 * sum(value < found.median for value in some) <= len(some)
    assert 2 * sum(value > found.median for value in some) <= len(some)


def test_what_has_no_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)
    with pytest.raises(ValueError, match="no values"):
        median([])
    with pytest.raises(ValueError, match="share = 50"):
        percentile([1.0], 50)
    with pytest.raises(ValueError, match="2 repetitions against 1"):
        ratios([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="a figure is 0"):
        ratios([1.0], [0.0])


def test_a_ratio_is_of_neighbours() -> None:
    """A machine that was half as fast in one repetition changes no ratio."""
    assert ratios([100.0, 50.0, 100.0], [200.0, 100.0, 200.0]) == [0.5, 0.5, 0.5]
    assert spread([0.5, 0.4, 0.6]) == Spread(0.5, 0.4, 0.6)
