"""A quick run beside the stored one."""

from __future__ import annotations

from benchmarks.report.comparison import aligned, compare
from benchmarks.report.goals import Goal
from tests.unit.benchmarks.runs import rates, run

GOAL = Goal("one", "end to end", "rate", "at least", 2.0, peer="Peer")
PLAIN = Goal("two", "embedded", "rate", "at least", 300, unit="/s")


def test_what_both_measured_is_compared() -> None:
    stored = run("2026-11-01T10:00:00", {"one": {"celery-durable": rates(100, 50, 200), "Peer": rates(100, 100, 100)}})
    now = run("2026-11-02T10:00:00", {"one": {"celery-durable": rates(50), "Peer": rates(100)}})
    assert compare([GOAL, PLAIN], now, {"one": stored}) == [
        ("end to end", "at least 2 times Peer", "0.50 times", "1.00 times (0.50 to 2.00)", "0.50")
    ]


def test_what_was_never_stored_stands_alone() -> None:
    now = run("2026-11-02T10:00:00", {"two": {"celery-durable": rates(150)}})
    assert compare([GOAL, PLAIN], now, {}) == [("embedded", "at least 300 /s", "150 /s", "-", "-")]


def test_columns_are_aligned() -> None:
    assert aligned([("a", "b"), ("long", "c")]) == "a     b\nlong  c"
