"""How long things took after each kind of fault, by the history alone."""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.chaos.bodies import Run, runs_of
from tests.chaos.history import NANOSECONDS, Enqueued, Event, Fault
from tests.chaos.plans import lane_of

BEFORE_S = 0.5
"""A probe that was enqueued so shortly before a fault counts as hit by it."""


@dataclass
class Recovery:
    """Figures of one kind of fault, in seconds; one entry a fault (or, for ``again_s``, a lost run)."""

    faults: int = 0
    again_s: list[float] = field(default_factory=list)
    """From the fault to the next run of an operation whose process it killed or froze."""
    late_s: list[float] = field(default_factory=list)
    """The same from the end of the lost run's heartbeat timeout: what detection and delivery cost."""
    lanes: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """The longest wait of a probe that was enqueued from the fault to the next fault, by lane."""


def p50(values: Sequence[float]) -> float | None:
    """The median; None of nothing."""
    return statistics.median(values) if values else None


def recoveries(events: Sequence[Event], *, heartbeat_timeout_s: float) -> dict[str, Recovery]:
    """The figures by kind of fault."""
    found: dict[str, Recovery] = defaultdict(Recovery)
    faults = [event for event in events if isinstance(event, Fault)]
    for fault in faults:
        found[fault.kind].faults += 1
    for runs in runs_of(events).values():
        for run, successor in itertools.pairwise(runs):
            _add_lost(found, faults, run, successor, heartbeat_timeout_s)
    for (index, lane), wait_s in _longest_waits(events, faults).items():
        found[faults[index].kind].lanes[lane].append(wait_s)
    return dict(found)


def _add_lost(
    found: dict[str, Recovery], faults: Sequence[Fault], run: Run, successor: Run, heartbeat_timeout_s: float
) -> None:
    begun_ns = successor.started.time_ns
    hit = [
        fault
        for fault in faults
        if run.started.pid in fault.pids and run.begun_ns <= fault.time_ns <= min(begun_ns, run.over_ns)
    ]
    if not hit:
        return
    recovery = found[hit[0].kind]
    recovery.again_s.append((begun_ns - hit[0].time_ns) / NANOSECONDS)
    recovery.late_s.append((begun_ns - run.alive_ns) / NANOSECONDS - heartbeat_timeout_s)


def _longest_waits(events: Sequence[Event], faults: Sequence[Fault]) -> dict[tuple[int, str], float]:
    """(Number of the fault in the list, lane) → the longest wait from enqueue to first start, in seconds."""
    first = {operation: runs[0].started.time_ns for operation, runs in runs_of(events).items()}
    begins = [fault.time_ns - round(BEFORE_S * NANOSECONDS) for fault in faults]
    longest: dict[tuple[int, str], float] = {}
    for event in events:
        if not isinstance(event, Enqueued) or event.operation not in first:
            continue
        lane, index = lane_of(event.account), bisect_right(begins, event.time_ns) - 1
        if lane is not None and index >= 0:
            wait_s = max(0.0, (first[event.operation] - event.time_ns) / NANOSECONDS)
            longest[index, lane] = max(longest.get((index, lane), 0.0), wait_s)
    return longest
