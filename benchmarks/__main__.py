"""``python -m benchmarks [names…]``: measures, prints, stores the run and writes docs/performance.md."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime

from benchmarks import page
from benchmarks.report.comparison import aligned, compare
from benchmarks.report.goals import GOALS
from benchmarks.report.record import Measured, Run, load_all, newest_of_each, store
from benchmarks.report.tables import number, scenario_table
from benchmarks.scenario import Bench, Scenario
from benchmarks.scenarios import GROUPS, SCENARIOS
from benchmarks.setting import machine
from benchmarks.setting.child import Failed
from benchmarks.setting.servers import Servers

REPETITIONS_QUICK, SCALE_QUICK = 1, 0.4
POINTS_QUICK = 2
"""Of a scenario that grows."""


def main(words: Sequence[str]) -> int:
    """Returns the exit code. A scenario that fails is told and left out; what the others measured is kept."""
    arguments = _parse(words)
    if arguments.list:
        print(aligned((name, scenario.what) for name, scenario in SCENARIOS.items()))
        return 0
    if arguments.page:
        page.write(load_all())
        return 0
    quick = arguments.quick
    run = Run(
        command=shlex.join(["python", "-m", "benchmarks", *words]),
        started_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S"),
        commit=machine.commit(),
        machine=machine.describe(),
    )
    chosen = choose(arguments.names, quick=quick)
    repetitions = arguments.repetitions or (REPETITIONS_QUICK if quick else 0)
    scale = arguments.scale or (SCALE_QUICK if quick else 1.0)
    failed: list[str] = []
    with ExitStack() as handles:
        bench = Bench(Servers(handles), scale)
        for scenario in chosen:
            try:
                measured = _measure(scenario, bench, repetitions or scenario.repetitions, quick=quick)
            except Failed as error:
                failed.append(scenario.name)
                print(f"{scenario.name} failed: {error}", file=sys.stderr, flush=True)
            else:
                run.scenarios[scenario.name] = measured
    stored = newest_of_each(load_all())
    print(aligned([("what", "goal", "now", "stored (spread)", "now/stored"), *compare(GOALS, run, stored)]))
    enough = not repetitions or all(repetitions >= scenario.repetitions for scenario in chosen)
    if not quick and scale == 1.0 and enough and run.scenarios:
        print(f"stored: benchmarks/results/{store(run).name}")
        page.write(load_all())
    if failed:
        print(f"failed, and not stored: {', '.join(failed)}")
    return 1 if failed else 0


def choose(names: Sequence[str], *, quick: bool) -> list[Scenario]:
    """The named scenarios and groups; without names all, or all that belong to the quick comparison."""
    if names:
        single = [one for name in names for one in GROUPS.get(name, (name,))]
        return [SCENARIOS[name] for name in dict.fromkeys(single)]
    return [scenario for scenario in SCENARIOS.values() if scenario.quick or not quick]


def measured_names(scenario: Scenario, names: Sequence[str], *, quick: bool) -> list[str]:
    """Which of the contenders are measured: all, or those of the quick comparison, or the smallest on the axis."""
    if quick and scenario.quick:
        return [name for name in names if name in scenario.quick]
    return list(names[:POINTS_QUICK] if quick and scenario.axis else names)


def _measure(scenario: Scenario, bench: Bench, repetitions: int, *, quick: bool) -> Measured:
    """Every contender, or those that are quick, once in each repetition, in an order that turns with it."""
    with scenario.contenders(bench) as contenders:
        names = measured_names(scenario, list(contenders), quick=quick)
        settings = {name: contenders[name].settings for name in names if contenders[name].settings}
        places = {name: at for name in names if (at := contenders[name].at) is not None}
        measured = Measured(scenario.what, settings, axis=scenario.axis, at=places)
        measured.samples = {name: [] for name in names}
        for repetition in range(repetitions):
            turn = repetition % len(names)
            for name in [*names[turn:], *names[:turn]]:
                began = time.monotonic()
                figures = contenders[name].measure()
                measured.samples[name].append(figures)
                shown = ", ".join(f"{key} {number(value)}" for key, value in figures.items())
                print(
                    f"{scenario.name} {repetition + 1}: {name}: {shown} ({time.monotonic() - began:.0f} s)", flush=True
                )
    print(scenario_table(measured), flush=True)
    return measured


def _parse(words: Sequence[str]) -> argparse.Namespace:
    known = [*SCENARIOS, *GROUPS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"scenarios: {', '.join(known)}; none: all")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the ratios that matter, in 3 minutes, beside the stored ones; of a scenario that grows two points",
    )
    parser.add_argument("--repetitions", type=int, help="default: the scenario's own; a run with fewer is not stored")
    parser.add_argument("--scale", type=float, help="of every number of calls; a run with another than 1 is not stored")
    parser.add_argument("--page", action="store_true", help="only write docs/performance.md from the stored runs")
    parser.add_argument("--list", action="store_true", help="only list the scenarios")
    arguments = parser.parse_args(words)
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        parser.error(f"no scenario {', '.join(unknown)}; there are {', '.join(known)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
