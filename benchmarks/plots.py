"""A picture for each scenario: the medians, and lines from the smallest to the largest repetition.

Bars of the figures that the goals are about; of what grows throughput and latency along the axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.report.figures import Spread, spread
from benchmarks.report.goals import GOALS
from benchmarks.report.record import Measured, Run
from benchmarks.report.tables import number

WIDTH_IN, BAR_IN, REST_IN = 7.0, 0.42, 1.1
GROWTH_IN = (7.0, 5.2)
COLOURS = ("#30638e", "#d1495b", "#edae49")


def figures_of(scenario: str) -> list[str]:
    """The figures that the goals of the scenario are about, in their order."""
    return list(dict.fromkeys(goal.figure for goal in GOALS if goal.scenario == scenario))


def bars(measured: Measured, figure: str) -> dict[str, Spread]:
    """What is drawn of one figure, by contender."""
    found = {name: measured.values(name, figure) for name in measured.samples}
    return {name: spread(values) for name, values in found.items() if values}


def curve(measured: Measured, figure: str) -> list[tuple[float, Spread]]:
    """What is drawn of one figure along the axis, from its start on."""
    found = bars(measured, figure)
    return sorted((measured.at[name], one) for name, one in found.items())


def write(newest: Mapping[str, Run], folder: Path) -> None:
    """Draws each scenario to ``folder``; needs matplotlib."""
    folder.mkdir(exist_ok=True)
    for name, run in newest.items():
        measured = run.scenarios[name]
        draw = _draw_growth if measured.axis else _draw_bars
        draw(name, measured, folder / f"{name}.png")


def _draw_growth(scenario: str, measured: Measured, path: Path) -> None:
    from matplotlib.figure import Figure

    canvas = Figure(figsize=GROWTH_IN, layout="constrained")
    throughput, latency = canvas.subplots(2, sharex=True)
    for axes, figures in ((throughput, ("rate",)), (latency, ("p50_ms", "p99_ms"))):
        for figure, colour in zip(figures, COLOURS, strict=False):
            points = curve(measured, figure)
            medians = [found.median for _, found in points]
            errors = [
                [found.median - found.low for _, found in points],
                [found.high - found.median for _, found in points],
            ]
            places = [at for at, _ in points]
            axes.errorbar(
                places, medians, yerr=errors, color=colour, ecolor="#333333", capsize=3, marker="o", label=figure
            )
            for at, found in points:
                axes.annotate(number(found.median), (at, found.median), (0, 6), textcoords="offset points", ha="center")
        largest = max((found.high for figure in figures for _, found in curve(measured, figure)), default=1.0)
        axes.set_ylim(0, 1.25 * largest)
        axes.set_ylabel(f"{figures[0]}, 1/s" if len(figures) == 1 else "ms")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    latency.legend(loc="best")
    places = sorted(measured.at.values())
    if places[0] > 0:
        latency.set_xscale("log")
        latency.set_xlim(places[0] / 1.5, places[-1] * 1.5)
    else:  # linear up to the next place, so that 0 has one too
        latency.set_xscale("symlog", linthresh=places[1])
        latency.set_xlim(-0.3 * places[1], places[-1] * 2)
    latency.set_xticks(places, [f"{place:,.0f}" for place in places])
    latency.minorticks_off()
    latency.set_xlabel(measured.axis)
    throughput.set_title(scenario)
    canvas.savefig(path, dpi=110, metadata={"Software": None})


def _draw_bars(scenario: str, measured: Measured, path: Path) -> None:
    from matplotlib.figure import Figure

    figures = figures_of(scenario)
    names = list(measured.samples)
    rows = len(names) * len(figures)
    canvas = Figure(figsize=(WIDTH_IN, REST_IN + BAR_IN * rows), layout="constrained")
    axes = canvas.subplots()
    largest = 0.0
    for offset, figure in enumerate(figures):
        for name, found in bars(measured, figure).items():
            place = names.index(name) * len(figures) + offset
            errors = [[found.median - found.low], [found.high - found.median]]
            label = figure if name == names[0] else None
            colour = COLOURS[offset % len(COLOURS)]
            axes.barh(place, found.median, xerr=errors, color=colour, ecolor="#333333", capsize=3, label=label)
            axes.annotate(number(found.median), (found.high, place), (6, 0), textcoords="offset points", va="center")
            largest = max(largest, found.high)
    middle = (len(figures) - 1) / 2
    axes.set_yticks([index * len(figures) + middle for index in range(len(names))], names)
    axes.invert_yaxis()
    axes.set_xlim(0, largest * 1.15)
    axes.set_xlabel(", ".join(figures))
    axes.set_title(scenario)
    if len(figures) > 1:
        axes.legend(loc="lower right")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    canvas.savefig(path, dpi=110, metadata={"Software": None})
