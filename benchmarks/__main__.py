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
from benchmarks.scenarios import SCENARIOS
from benchmarks.setting import machine
from benchmarks.setting.servers import Servers

REPETITIONS, REPETITIONS_QUICK, SCALE_QUICK = 3, 1, 0.4


def main(words: Sequence[str]) -> int:
    """Returns the exit code; a measurement that fails raises."""
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
    repetitions = arguments.repetitions or (REPETITIONS_QUICK if quick else REPETITIONS)
    scale = arguments.scale or (SCALE_QUICK if quick else 1.0)
    with ExitStack() as handles:
        bench = Bench(Servers(handles), scale)
        for scenario in choose(arguments.names, quick=quick):
            run.scenarios[scenario.name] = _measure(scenario, bench, repetitions, scenario.quick if quick else ())
    stored = newest_of_each(load_all())
    print(aligned([("what", "goal", "now", "stored (spread)", "now/stored"), *compare(GOALS, run, stored)]))
    if not quick and scale == 1.0 and repetitions >= REPETITIONS:
        print(f"stored: benchmarks/results/{store(run).name}")
        page.write(load_all())
    return 0


def choose(names: Sequence[str], *, quick: bool) -> list[Scenario]:
    """The named scenarios; without names all, or all that belong to the quick comparison."""
    if names:
        return [SCENARIOS[name] for name in names]
    return [scenario for scenario in SCENARIOS.values() if scenario.quick or not quick]


def _measure(scenario: Scenario, bench: Bench, repetitions: int, only: Sequence[str]) -> Measured:
    """Every contender, or ``only`` those, once in each repetition, in an order that turns with it."""
    with scenario.contenders(bench) as contenders:
        names = [name for name in contenders if not only or name in only]
        settings = {name: contenders[name].settings for name in names if contenders[name].settings}
        measured = Measured(scenario.what, settings)
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"scenarios: {', '.join(SCENARIOS)}; none: all")
    parser.add_argument(
        "--quick", action="store_true", help="the ratios that matter, in 3 minutes, beside the stored ones"
    )
    parser.add_argument("--repetitions", type=int, help=f"default {REPETITIONS}; a run with fewer is not stored")
    parser.add_argument("--scale", type=float, help="of every number of calls; a run with another than 1 is not stored")
    parser.add_argument("--page", action="store_true", help="only write docs/performance.md from the stored runs")
    parser.add_argument("--list", action="store_true", help="only list the scenarios")
    arguments = parser.parse_args(words)
    unknown = [name for name in arguments.names if name not in SCENARIOS]
    if unknown:
        parser.error(f"no scenario {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
