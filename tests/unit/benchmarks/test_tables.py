"""What is written to docs/performance.md."""

from __future__ import annotations

import pytest

from benchmarks.page import render
from benchmarks.report.cost_table import PAGE
from benchmarks.report.figures import Spread
from benchmarks.report.goals import Goal
from benchmarks.report.record import load_all, newest_of_each
from benchmarks.report.tables import (
    goals_table,
    machine_text,
    number,
    replace_between,
    scenario_table,
    scenario_text,
    scenarios_text,
    with_spread,
)
from tests.unit.benchmarks.runs import grown, rates, run

RUN = run(
    "2026-11-02T10:00:00",
    {
        "one": {"celery-durable": rates(100, 300, 200), "Peer": rates(100, 100, 100)},
        "two": {"celery-durable": rates(9)},
    },
)


def test_numbers_have_three_digits() -> None:
    assert [number(value) for value in (12_345.6, 123.4, 12.34, 1.234, 0.1234)] == [
        "12,346",
        "123",
        "12.3",
        "1.23",
        "0.12",
    ]
    assert with_spread(Spread(2, 1, 3), "ms") == "2.00 ms (1.00 to 3.00)"


def test_each_goal_has_a_line() -> None:
    goals = [
        Goal("one", "fast enough", "rate", "at least", 2.0, peer="Peer"),
        Goal("one", "not fast enough", "rate", "at least", 3.0, peer="Peer"),
        Goal("one", "a figure that nobody measured", "p50_ms", "at most", 3.0),
        Goal("three", "a scenario that nobody measured", "rate", "at least", 3.0),
    ]
    lines = goals_table(goals, {"one": RUN}).splitlines()[2:]
    assert lines == [
        "| fast enough | at least 2 times Peer | 2.00 times (1.00 to 3.00) | yes | `one` 2026-11-02T1000Z-0123456 |",
        "| not fast enough | at least 3 times Peer | 2.00 times (1.00 to 3.00) | **no** "
        "| `one` 2026-11-02T1000Z-0123456 |",
        "| a figure that nobody measured | at most 3 | not measured yet |  | `one` |",
        "| a scenario that nobody measured | at least 3 | not measured yet |  | `three` |",
    ]


def test_a_scenario_shows_every_figure_of_every_contender() -> None:
    measured = run("2026-11-02T10:00:00", {"one": {"A": rates(1, 2, 3), "B": [{"p50_ms": 5.0}]}}).scenarios["one"]
    assert scenario_table(measured).splitlines() == [
        "| contender | repetitions | p50_ms | rate |",
        "| --- | --- | --- | --- |",
        "| A | 3 |  | 2.00 (1.00 to 3.00) |",
        "| B | 1 | 5.00 (5.00 to 5.00) |  |",
    ]


def test_a_scenario_names_its_run_its_command_and_its_settings() -> None:
    text = scenarios_text({"one": RUN})
    assert text.startswith("### one\n\nWhat it measures.\nRun 2026-11-02T1000Z-0123456: `python -m benchmarks`")
    assert text.endswith("- celery-durable: defaults")


def test_what_grows_has_a_place_of_its_own() -> None:
    both = run("2026-11-02T10:00:00", {"one": {"celery-durable": rates(1)}})
    both.scenarios["growth-accounts"] = grown((1.0, {"rate": 2.0}))
    assert "growth-accounts" not in scenarios_text({"one": both, "growth-accounts": both})
    text = scenario_text("growth-accounts", both)
    assert "![growth-accounts](performance/growth-accounts.png)" in text
    assert "| accounts | repetitions | rate |" in text
    assert scenario_text("growth-accounts", None) == "Not measured yet."


def test_a_machine_is_described_once() -> None:
    other = run("2026-11-03T10:00:00", {})
    assert machine_text([RUN, other, RUN]) == (
        "Runs 2026-11-02T1000Z-0123456, 2026-11-03T1000Z-0123456:\n\n- processor: 2 x P"
    )


def test_only_what_is_between_the_markers_is_replaced() -> None:
    text = "before <!-- a --> old <!-- /a --> after"
    assert replace_between(text, "a", "new") == "before <!-- a -->\n\nnew\n\n<!-- /a --> after"
    assert replace_between(replace_between(text, "a", "new"), "a", "new") == replace_between(text, "a", "new")
    for broken in ("<!-- /a --> <!-- a -->", "<!-- a -->", "<!-- a --><!-- a --><!-- /a -->"):
        with pytest.raises(ValueError, match="once each and in this order"):
            replace_between(broken, "a", "new")


def test_a_scenario_shows_its_picture() -> None:
    assert "![one](performance/one.png)" in scenarios_text({"one": RUN})
    for name in newest_of_each(load_all()):
        assert (PAGE.with_suffix("") / f"{name}.png").is_file(), "run: python -m benchmarks --page"


def test_the_page_is_not_stale() -> None:
    text = PAGE.read_text()
    assert render(text, load_all()) == text, "run: python -m benchmarks --page"
