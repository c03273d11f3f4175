"""Runs seeds of the simulation: ``make sim [SEED=] [N=]``, or ``python -m tests.simulation.run``."""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.invariants import InvariantViolation
from tests.simulation import wiring
from tests.simulation.checks import ALL_CHECKS
from tests.simulation.crashes import SEEDS_FOR_ALL, missed
from tests.simulation.mutations import MUTATIONS, broken, finds
from tests.simulation.shells import World

ERRORS_EXPECTED = (
    "a new epoch begins",
    "were lost together",
    "no longer has what was read",
    "the producer is unusable",
)
"""What production code logs as an error where the simulated surroundings deserve it."""
GUARDED_COUNT = 100
"""In so many seeds every check must have looked at something."""
_LOGGERS = ("celery_durable", "holder_service")


@dataclass
class Outcome:
    """One seed."""

    seed: int
    digest: str = ""
    failure: str = ""
    stats: Counter[str] = field(default_factory=Counter)
    looked: Counter[str] = field(default_factory=Counter)


class _Errors(logging.Handler):
    """Takes errors that production code logs where it would go on, such as a decision that failed."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.world: World | None = None

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if self.world is not None and not any(part in text for part in ERRORS_EXPECTED):
            cause = f" ({record.exc_info[1]!r})" if record.exc_info else ""
            self.world.errors.append(f"{record.name}: {text}{cause}")


_errors = _Errors()


@contextmanager
def simulator() -> Iterator[None]:
    """Everything is in place to run seeds."""
    before = [(logger, logger.level, logger.propagate) for logger in map(logging.getLogger, _LOGGERS)]
    for logger, _, _ in before:
        logger.setLevel(logging.ERROR)
        logger.propagate = False
        logger.addHandler(_errors)
    try:
        with wiring.simulated():
            yield
    finally:
        for logger, level, propagate in before:
            logger.removeHandler(_errors)
            logger.setLevel(level)
            logger.propagate = propagate


def run(seed: int, *, lines: list[str] | None = None, mutation: str = "") -> Outcome:
    """Runs one seed inside :func:`simulator`."""
    world = World(seed, lines=lines)
    wiring.use(world)
    _errors.world = world
    outcome = Outcome(seed, stats=world.stats, looked=world.invariants.looked)
    try:
        outcome.digest = world.run()
    except Exception as error:  # noqa: BLE001 - whatever leaves a step is a fault; the other seeds go on
        what = str(error).splitlines()[0] if isinstance(error, InvariantViolation) else _unexpected(error)
        again = f"python -m tests.simulation.run --mutation '{mutation}' --seed " if mutation else "make sim SEED="
        outcome.failure = f"{what}\n  replay: {again}{seed}"
    finally:
        _errors.world = None
    return outcome


def _unexpected(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"unexpected: {error!r:.200} at {os.path.basename(frame.filename)}:{frame.lineno}"


def _work(task: tuple[str, int, int]) -> list[Outcome]:
    mutation, first, count = task
    gc.collect()
    gc.freeze()  # what lives on is not looked through again before the next task
    gc.disable()
    with simulator(), broken(mutation):
        return [run(seed, mutation=mutation) for seed in range(first, first + count)]


def run_many(first: int, count: int, *, jobs: int, mutation: str = "") -> Iterator[Outcome]:
    """Runs seeds in several processes; the outcomes come as they are done."""
    size = max(1, min(25, count // max(1, jobs)))
    tasks = [(mutation, start, min(size, first + count - start)) for start in range(first, first + count, size)]
    if jobs <= 1:
        for task in tasks:
            yield from _work(task)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for outcomes in pool.imap_unordered(_work, tasks):
            yield from outcomes


def find(name: str, count: int) -> tuple[int | None, str]:
    """Runs seeds with one rule broken. Returns how many it took (None: it was not found), and what was found."""
    with simulator(), broken(name):
        for seed in range(count):
            failure = run(seed, mutation=name).failure
            if finds(name, failure):
                return seed + 1, failure
    return None, ""


def find_all(count: int, jobs: int) -> int:
    """Breaks one rule after the other, and tells how many seeds it took to find that."""
    names = [name for name in MUTATIONS if name]
    missed = 0
    print("| broken rule | seeds | what turns red |\n| --- | --- | --- |", flush=True)
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        results = [(name, pool.apply_async(find, (name, count))) for name in names]
        for name, result in results:
            seeds, failure = result.get()
            missed += seeds is None
            found = f"not in {count}" if seeds is None else str(seeds)
            print(f"| {name} | {found} | {failure.partition(':')[0]} |", flush=True)
    return 1 if missed else 0


def replay(seed: int, mutation: str = "") -> int:
    """Runs one seed and prints its log."""
    lines: list[str] = []
    with simulator(), broken(mutation):
        outcome = run(seed, lines=lines, mutation=mutation)
    print("\n".join(lines))
    print(f"seed {seed}: {outcome.failure or 'holds'}; log {outcome.digest[:16]}")
    return 1 if outcome.failure else 0


def _without_effect(stats: Counter[str]) -> list[str]:
    """Kinds of faults that were drawn and never possible, and of commits in doubt or refused that none was."""
    drawn = {name.partition(": ")[2] for name in stats if name.startswith(("fault: ", "not possible: "))}
    idle = sorted(name for name in drawn if not stats[f"fault: {name}"])
    return idle + [
        f"{kind} commits" for kind in ("unsure", "error") if not any(n.startswith(f"{kind} at ") for n in stats)
    ]


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this one, with its log")
    parser.add_argument("--count", type=int, default=1_000, help="how many to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--find", action="store_true", help="how many seeds find each seeded violation")
    parser.add_argument("--digests", action="store_true", help="print each seed's log hash, and nothing else")
    parser.add_argument("--mutation", default="", help="a seeded violation, from tests.simulation.mutations")
    return parser.parse_args()


def main() -> int:
    """The command line."""
    options = _options()
    if options.seed is not None:
        return replay(options.seed, options.mutation)
    if options.find:
        return find_all(options.count, options.jobs)
    if options.digests:
        for outcome in run_many(options.first, options.count, jobs=options.jobs):
            print(outcome.seed, outcome.digest)
        return 0
    begun_s, told_s = time.monotonic(), 0.0
    stats: Counter[str] = Counter()
    looked: Counter[str] = Counter()
    failed = 0
    outcomes = run_many(options.first, options.count, jobs=options.jobs, mutation=options.mutation)
    for done, outcome in enumerate(outcomes, 1):
        stats.update(outcome.stats)
        looked.update(outcome.looked)
        if outcome.failure:
            failed += 1
            print(f"seed {outcome.seed}: {outcome.failure}", flush=True)
        elapsed_s = time.monotonic() - begun_s
        if elapsed_s - told_s > 5 or done == options.count:
            told_s = elapsed_s
            print(f"{done} of {options.count} seeds, {elapsed_s:.0f} s, violations: {failed}", flush=True)
    faults = ", ".join(
        f"{name.removeprefix('fault: ')} {count}" for name, count in sorted(stats.items()) if name.startswith("fault: ")
    )
    crashed_times = sum(count for name, count in stats.items() if name.startswith("crash at "))
    work = ("operations", "sent", "steps", "virtual s", "settles refused", "died", "exceptions")
    print(", ".join(f"{name} {stats[name]}" for name in work))
    print(f"faults: {faults or 'none'}")
    again = (f"{name.removeprefix('again: ')} {n}" for name, n in sorted(stats.items()) if name.startswith("again: "))
    print(f"attempts after the first: {', '.join(again) or 'none'}")
    idle = _without_effect(stats)
    print(f"faults without effect: {', '.join(idle) or 'none'}")
    crashed = {name.removeprefix("crash at ") for name in stats if name.startswith("crash at ")}
    left = missed(crashed)
    rarest = sorted((stats[f"crash at {point}"], point) for point in crashed)[:8]
    print(f"crashed at least often: {', '.join(f'{point} {times}' for times, point in rarest)}")
    print(f"crashes: {crashed_times}, at {len(crashed)} crash points; never at: {', '.join(left) or 'none left'}")
    print(f"checks: {dict(sorted(looked.items()))}")
    blind = [name for name in ALL_CHECKS if not looked[name]] if options.count >= GUARDED_COUNT else []
    if blind:
        print(f"checks that never looked at anything: {', '.join(blind)}")
    print(f"violations: {failed}")
    if blind:
        return 1
    if (idle or left) and options.count >= SEEDS_FOR_ALL and not options.mutation:
        print(f"{options.count} seeds should meet each kind of fault, and crash at each point (crashes.py)")
        return 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
