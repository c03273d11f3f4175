"""Runs of bodies, by the history: when each began, was alive, stood still, was killed, and was over. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.chaos.history import NANOSECONDS, Beat, Ended, Event, Fault, FaultOver, Settled, Started

WAKES_S = 10.0
"""A body that was frozen must stop within this after it was continued."""
DIES = "kills its own process"


@dataclass
class Run:
    """One run of a body."""

    started: Started
    begun_ns: int
    """When its attempt was begun in SQL, a moment before the body."""
    ended: Ended | None = None
    settled: bool = False
    """Whether its outcome was committed under its own token: nothing may make it again then."""
    beats_ns: list[int] = field(default_factory=list)
    """When each heartbeat that succeeded was begun, in order; the first is the start itself, or the body."""
    killed_ns: int | None = None
    killed_by: str | None = None
    frozen: list[tuple[float, float]] = field(default_factory=list)
    """From when to when its process was stopped."""

    @property
    def alive_ns(self) -> int:
        """When the last heartbeat that succeeded was begun."""
        return self.beats_ns[-1]

    @property
    def over_ns(self) -> float:
        """When the body was over; infinity: nothing says that it ever was."""
        if self.ended is not None:
            return self.ended.time_ns
        return math.inf if self.killed_ns is None else self.killed_ns

    def frozen_at(self, time_ns: float) -> bool:
        """Whether its process stood still then, or had been continued less than :data:`WAKES_S` ago."""
        return any(begin <= time_ns <= end + WAKES_S * NANOSECONDS for begin, end in self.frozen)


def runs_of(events: Iterable[Event]) -> dict[str, list[Run]]:
    """The runs of each operation, in order."""
    runs: dict[str, Run] = {}
    beats: dict[str, list[int]] = defaultdict(list)
    for event in events:
        if isinstance(event, Started):
            runs[event.token] = Run(event, event.time_ns, beats_ns=[event.time_ns])
        elif isinstance(event, Ended) and event.token in runs:
            runs[event.token].ended = event
        elif isinstance(event, Settled) and event.token in runs:
            runs[event.token].settled = True
        elif isinstance(event, Beat):
            beats[event.token].append(event.time_ns)
    for token, run in runs.items():
        # The first is the start itself, and before the body.
        if beats[token]:
            run.beats_ns = sorted(beats[token])
            run.begun_ns = min(run.begun_ns, run.beats_ns[0])
    _mark_faults(list(runs.values()), events)
    found: dict[str, list[Run]] = defaultdict(list)
    # By attempt: a body that was frozen before it began may begin after its successor.
    for run in sorted(runs.values(), key=lambda run: run.started.attempt):
        found[run.started.operation].append(run)
    return dict(found)


def fault_spans(events: Iterable[Event]) -> list[tuple[Fault, float]]:
    """Every fault, and when it was over (infinity: never)."""
    over = {event.number: event.time_ns for event in events if isinstance(event, FaultOver)}
    return [(event, over.get(event.number, math.inf)) for event in events if isinstance(event, Fault)]


def _mark_faults(runs: Sequence[Run], events: Iterable[Event]) -> None:
    spans: dict[int, list[tuple[Fault, float]]] = defaultdict(list)
    for fault, over_ns in fault_spans(events):
        for pid in fault.pids:
            spans[pid].append((fault, over_ns))
    deaths: dict[int, int] = {}
    for run in runs:
        if run.ended is not None and run.ended.how == "died":
            deaths[run.started.pid] = run.killed_ns = run.ended.time_ns
            run.killed_by = DIES
    for run in runs:
        started, death_ns = run.started, deaths.get(run.started.pid)
        for fault, over_ns in spans.get(started.pid, ()):
            if over_ns < run.begun_ns:
                continue
            if "freeze" in fault.kind:
                run.frozen.append((fault.time_ns, over_ns))
            elif run.killed_ns is None:
                # A fault is noted before it is made: the body may have begun in between.
                run.killed_ns, run.killed_by = max(fault.time_ns, started.time_ns), fault.kind
        # A body that kills its process takes the others of that process with it.
        if death_ns is not None and run.over_ns > death_ns >= started.time_ns:
            run.killed_ns, run.killed_by = death_ns, DIES
