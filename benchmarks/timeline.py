"""Where the time of a hand-over goes: ``python -m benchmarks.timeline [--rounds 40]``.

Two services hand an account's only permit to each other, as in the scenario ``release``, and every process notes when
it passes its crash points: before and after each commit, publish and acknowledgement. Prints the medians of the ms from
one step to the next, from the end of one service's body to the start of the other's.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report.comparison import aligned
from benchmarks.report.figures import median
from benchmarks.scenarios.latency import HandOver
from benchmarks.setting.child import Failed
from benchmarks.setting.servers import Servers
from benchmarks.systems import durable

WARM_UP = 3
FROM, TO, HOLDER = "the one's dispatcher", "the other's dispatcher", "holder"
FROM_WORKER, TO_WORKER = "the one's worker", "the other's worker"
PATH = (
    (FROM_WORKER, "worker.succeed.after_commit", "the worker settles"),
    (FROM, "passes.step.before_commit", "the bell, and a pass: the permit is free, a report"),
    (FROM, "passes.step.after_commit", "its commit"),
    (FROM, "relay.message.before_publish", "the relay claims the report"),
    (HOLDER, "holder.batch.before_commit", "Kafka, and the holder's batch: the other's turn, a reply"),
    (HOLDER, "holder.batch.after_commit", "its commit"),
    (HOLDER, "relay.message.before_publish", "the relay claims the reply"),
    (TO, "replies.apply.before_commit", "Kafka, and the reply: an operation is admitted"),
    (TO, "replies.apply.after_commit", "its commit"),
    (TO, "delivery.message.before_publish", "delivery reads the message"),
    (TO, "delivery.message.after_publish", "Celery's broker has it"),
    (TO_WORKER, "worker.start.after_commit", "the worker receives it, and starts the attempt"),
)
"""(Which process, which crash point, what was done since the one before)."""


@dataclass(frozen=True, slots=True)
class Passing:
    """One process at one crash point."""

    time_ns: int
    pid: int
    point: str


def main(words: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args(words).rounds
    with ExitStack() as handles:
        file = Path(handles.enter_context(tempfile.TemporaryDirectory(prefix="celery-durable-bench-"))) / "passings"
        folder = str(Path(__file__).with_name("timed"))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        os.environ["BENCH_PASSINGS"] = str(file)
        running = handles.enter_context(durable.running(Servers(handles), services=2, concurrency=1))
        hand_over = HandOver(running)
        spans = []
        for number in range(rounds + WARM_UP):
            file.write_bytes(b"")
            hand_over.pass_on()
            steps = steps_ms(_read(file), _labels(running, hand_over.from_number))
            if number >= WARM_UP and steps is not None:
                spans.append(steps)
    if not spans:
        raise Failed("no round passed all the points of a hand-over")
    total = median([sum(one) for one in spans])
    rows = [
        (f"{median([one[number] for one in spans]):.1f}", what, who) for number, (who, _, what) in enumerate(PATH[1:])
    ]
    print(
        aligned(
            [
                ("ms", "what", "process"),
                *rows,
                (f"{total:.1f}", f"in all; {len(spans)} of {rounds} rounds passed all points", ""),
            ]
        )
    )
    return 0


def _labels(running: durable.Durable, number: int) -> dict[int, str]:
    """What each of the system's main processes is in a round in which that service hands its permit on."""
    labels = {}
    for process in running.processes:
        if process.label.startswith("holder"):
            labels[process.pid] = HOLDER
        elif "dispatcher" in process.label:
            labels[process.pid] = FROM if process.label.startswith(f"service{number}") else TO
    return labels


def _read(file: Path) -> list[Passing]:
    fields = (line.split() for line in file.read_text().splitlines())
    return sorted(
        (Passing(int(time_ns), int(pid), point) for time_ns, pid, point in fields), key=lambda one: one.time_ns
    )


def steps_ms(passings: Sequence[Passing], labels: Mapping[int, str]) -> list[float] | None:
    """The ms from each step of :data:`PATH` to the next, the first time that each comes after the one before.

    None: one is missing, for example because a poll was faster than the bell.
    """
    at_ns, steps = 0, []
    for who, point, _ in PATH:
        found = next(
            (one for one in passings if one.time_ns >= at_ns and one.point == point and _is(labels.get(one.pid), who)),
            None,
        )
        if found is None:
            return None
        steps.append((found.time_ns - at_ns) / 1e6)
        at_ns = found.time_ns
    return steps[1:]


def _is(label: str | None, who: str) -> bool:
    """Whether it is that process. A pool's children have no labels: the points tell them apart."""
    return label == who or (label is None and who in (FROM_WORKER, TO_WORKER))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
