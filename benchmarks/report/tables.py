"""Markdown for docs/performance.md, written between markers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.report.figures import Spread, spread
from benchmarks.report.goals import Goal
from benchmarks.report.record import Measured, Run

NOT_MEASURED = "not measured yet"


def number(value: float) -> str:
    """Three significant digits, thousands set apart."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def with_spread(found: Spread, unit: str = "") -> str:
    """``median (low to high)``."""
    return f"{number(found.median)}{unit and ' ' + unit} ({number(found.low)} to {number(found.high)})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def goals_table(goals: Iterable[Goal], newest: Mapping[str, Run]) -> str:
    """Each goal with what the newest run of its scenario measured."""
    rows = []
    for goal in goals:
        run = newest.get(goal.scenario)
        found = None if run is None else goal.measured(run.scenarios[goal.scenario])
        if run is None or found is None:
            rows.append((goal.what, goal.text, NOT_MEASURED, "", f"`{goal.scenario}`"))
            continue
        unit = "times" if goal.peer else goal.unit
        reached = "yes" if goal.reached(found) else "**no**"
        rows.append((goal.what, goal.text, with_spread(found, unit), reached, f"`{goal.scenario}` {run.name}"))
    return table(("what", "goal", "measured: median (spread)", "reached", "scenario and run"), rows)


def scenario_table(measured: Measured) -> str:
    """Every figure of every contender."""
    names = sorted({name for samples in measured.samples.values() for sample in samples for name in sample})
    rows = []
    for contender, samples in measured.samples.items():
        cells = []
        for name in names:
            values = measured.values(contender, name)
            cells.append(with_spread(spread(values)) if values else "")
        rows.append((contender, str(len(samples)), *cells))
    return table((measured.axis or "contender", "repetitions", *names), rows)


def scenarios_text(newest: Mapping[str, Run]) -> str:
    """Every scenario of the newest runs that compares contenders, with its table and its settings."""
    return "\n\n".join(
        f"### {name}\n\n{scenario_text(name, run)}" for name, run in newest.items() if not run.scenarios[name].axis
    )


def scenario_text(name: str, run: Run | None) -> str:
    """One scenario of its newest run, without a title."""
    if run is None:
        return f"{NOT_MEASURED.capitalize()}."
    measured = run.scenarios[name]
    settings = [f"- {contender}: {text}" for contender, text in measured.settings.items()]
    picture = f"![{name}](performance/{name}.png)"
    command = f"Run {run.name}: `{run.command}`"
    parts = [f"{measured.what}\n{command}", picture, scenario_table(measured), "\n".join(settings)]
    return "\n\n".join(parts).rstrip()


def machine_text(runs: Iterable[Run]) -> str:
    """The machine of each run, those of the same one told once."""
    described: dict[str, list[str]] = {}
    for run in runs:
        described.setdefault("\n".join(f"- {key}: {value}" for key, value in run.machine.items()), []).append(run.name)
    return "\n\n".join(f"Runs {', '.join(sorted(set(names)))}:\n\n{text}" for text, names in described.items())


def replace_between(text: str, name: str, new: str) -> str:
    """The text with everything between the markers ``<!-- name -->`` and ``<!-- /name -->`` replaced.

    :raises ValueError: the markers are not there, once each and in this order.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"give {begin} and {end}, once each and in this order")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{new}\n\n{end}{after}"
