"""How goals are judged."""

from __future__ import annotations

from benchmarks.report.figures import Spread
from benchmarks.report.goals import GOALS, Goal
from benchmarks.report.record import Measured
from benchmarks.scenarios import SCENARIOS
from tests.unit.benchmarks.runs import rates

RATIO = Goal("s", "what", "rate", "at least", 2.0, peer="Peer")
BOUND = Goal("s", "what", "p99_ms", "at most", 30, unit="ms")


def test_a_ratio_is_judged_by_its_median() -> None:
    found = RATIO.measured(Measured("", {}, {"celery-durable": rates(100, 300, 200), "Peer": rates(100, 100, 100)}))
    assert found == Spread(2.0, 1.0, 3.0)
    assert RATIO.reached(found)
    assert not RATIO.reached(Spread(1.99, 1.99, 5.0))
    assert RATIO.text == "at least 2 times Peer"


def test_a_bound_is_judged_by_the_figure_itself() -> None:
    found = BOUND.measured(Measured("", {}, {"celery-durable": [{"p99_ms": 31.0}, {"p99_ms": 29.0}, {"p99_ms": 30.0}]}))
    assert found == Spread(30.0, 29.0, 31.0)
    assert BOUND.reached(found)
    assert not BOUND.reached(Spread(30.1, 1.0, 31.0))
    assert BOUND.text == "at most 30 ms"


def test_what_was_not_measured_has_no_answer() -> None:
    assert RATIO.measured(Measured("", {}, {"celery-durable": rates(1)})) is None
    assert RATIO.measured(Measured("", {}, {"Peer": rates(1)})) is None
    assert BOUND.measured(Measured("", {}, {"celery-durable": rates(1)})) is None


def test_repetitions_of_which_only_one_side_is_there_do_not_count() -> None:
    found = RATIO.measured(Measured("", {}, {"celery-durable": rates(4, 6), "Peer": rates(2)}))
    assert found == Spread(2.0, 2.0, 2.0)


def test_every_goal_has_a_scenario_that_measures_it() -> None:
    assert {goal.scenario for goal in GOALS} == {one.name for one in SCENARIOS.values() if not one.axis}
