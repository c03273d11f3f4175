"""docs/performance.md: the parts of it that come from stored runs."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import capacity, plots
from benchmarks.report.cost_table import PAGE
from benchmarks.report.goals import GOALS
from benchmarks.report.record import Run, newest_of_each
from benchmarks.report.tables import goals_table, machine_text, replace_between, scenario_text, scenarios_text
from benchmarks.scenarios import SCENARIOS


def render(text: str, runs: Sequence[Run]) -> str:
    """The page with its generated parts made anew."""
    newest = newest_of_each(runs)
    text = replace_between(text, "goals", goals_table(GOALS, newest))
    for name in (scenario.name for scenario in SCENARIOS.values() if scenario.axis):
        text = replace_between(text, name, scenario_text(name, newest.get(name)))
    text = replace_between(text, "capacity", capacity.text(runs, text))
    text = replace_between(text, "machine", machine_text(newest.values()))
    return replace_between(text, "scenarios", scenarios_text(newest))


def write(runs: Sequence[Run]) -> None:
    """Writes the page and its pictures."""
    PAGE.write_text(render(PAGE.read_text(), runs))
    plots.write(newest_of_each(runs), PAGE.with_suffix(""))
