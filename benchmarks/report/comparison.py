"""A quick run beside what was stored last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from benchmarks.report.goals import Goal
from benchmarks.report.record import Run
from benchmarks.report.tables import number, with_spread


def compare(goals: Iterable[Goal], now: Run, stored: Mapping[str, Run]) -> list[tuple[str, str, str, str, str]]:
    """A line for each goal that ``now`` measured: what, goal, now, stored, and now over stored.

    :param stored: by scenario the run to compare with.
    """
    lines = []
    for goal in goals:
        measured = now.scenarios.get(goal.scenario)
        found = None if measured is None else goal.measured(measured)
        if found is None:
            continue
        run = stored.get(goal.scenario)
        before = None if run is None else goal.measured(run.scenarios[goal.scenario])
        unit = "times" if goal.peer else goal.unit
        lines.append(
            (
                goal.what,
                goal.text,
                f"{number(found.median)} {unit}".rstrip(),
                "-" if before is None else with_spread(before, unit),
                "-" if before is None or not before.median else f"{found.median / before.median:.2f}",
            )
        )
    return lines


def aligned(lines: Iterable[tuple[str, ...]]) -> str:
    """The lines as columns of equal width."""
    rows = list(lines)
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
