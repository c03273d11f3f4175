"""Judges a chaos run by its history, whose last entry is what SQL says at the end, and by nothing else. Pure.

A body is over when it says so, or when a fault killed its process. One that a fault froze is *left behind* from the
moment when the heartbeat timeout of its last heartbeat is over: its operation may then run again beside it, and is
counted once. Everything else that overlaps, runs again or stays is a violation.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from celery_durable.store.schema import SUCCEEDED
from tests.chaos.bodies import WAKES_S, Run, fault_spans, runs_of
from tests.chaos.history import NANOSECONDS, Enqueued, Event, Exited, Final, FinalOperation
from tests.chaos.plans import PLANS, limit_of
from tests.chaos.reasons import POSTGRESQL_RESTART, Reasons
from tests.invariants import Invariants, InvariantViolation

DATABASE_FAULTS = (POSTGRESQL_RESTART, "holder-database-lost")
START_S = 20.0
"""A process that was starting when its database went away may end by itself within this."""
WHOLE = ("bound", "group bound", "quiescence", "operations", "results", "states", "once")
"""What :meth:`Verdict.require` wants to have been looked at."""


CELERYS_OWN = "Unrecoverable error: ValueError('file descriptor is None')"
"""Celery 5.7.0 ends a worker that connects to its broker again while a dead child of its pool is not replaced yet."""


@dataclass(frozen=True)
class Violation:
    """Something that must never happen did."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass
class Verdict:
    """What was found, and at what was looked."""

    violations: list[Violation] = field(default_factory=list)
    looked: Counter[str] = field(default_factory=Counter)
    explained: Counter[str] = field(default_factory=Counter)
    """Runs that were made again, by what explains it."""
    runs: int = 0
    most_above: int = 0
    """By how many operations a limit was passed at the worst instant."""

    def blind(self) -> list[str]:
        """The checks that never looked at anything: such a run proves nothing."""
        return [name for name in WHOLE if not self.looked[name]]

    def count(self, kind: str) -> int:
        """How many violations of the kind there are."""
        return sum(violation.kind == kind for violation in self.violations)


def check(events: Sequence[Event], *, heartbeat_timeout_s: float) -> Verdict:
    """The verdict on a run whose faults are over and which has come to rest.

    :raises ValueError: the history has no end, or more than one.
    """
    [final] = [event for event in events if isinstance(event, Final)]
    return _Check(events, final, heartbeat_timeout_s).verdict()


class _Check:
    def __init__(self, events: Sequence[Event], final: Final, heartbeat_timeout_s: float) -> None:
        self._events = events
        self._final = final
        self._timeout_ns = heartbeat_timeout_s * NANOSECONDS
        self._enqueued = {event.operation: event for event in events if isinstance(event, Enqueued)}
        self._runs = runs_of(events)
        self._reasons = Reasons(events, heartbeat_timeout_s=heartbeat_timeout_s)
        self._invariants = Invariants()
        self._verdict = Verdict(runs=sum(len(runs) for runs in self._runs.values()))

    def verdict(self) -> Verdict:
        self._check_bound()
        for operation in sorted({*self._enqueued, *self._runs, *self._final.operations}):
            self._check_operation(operation)
        self._check_exits()
        self._check_rest()
        self._verdict.looked.update(self._invariants.looked)
        return self._verdict

    def _violated(self, kind: str, text: str) -> None:
        self._verdict.violations.append(Violation(kind, text))

    # The bound

    def _check_bound(self) -> None:
        """At every start: how many operations of its account, and of its group, have a body that is not over."""
        running: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
        for _, starts, operation, run in sorted(self._edges(), key=lambda edge: edge[:2]):
            account, group = run.started.account, run.started.group
            if not account:
                continue
            now = running[account]
            if not starts:
                now.pop(operation, None)
                continue
            now[operation] = (run.started.service, group)
            limits = {group: limit_of(group)} if group else {}
            in_use = Counter(now.values())
            of_group = sum(count for (_, name), count in in_use.items() if name == group)
            above = max(len(now) - limit_of(account), of_group - limits.get(group, of_group))
            self._verdict.most_above = max(self._verdict.most_above, above)
            try:
                self._invariants.bound(in_use, limit_of(account), limits)
            except InvariantViolation as error:
                self._violated("bound", f"account {account}: {error}; {sorted(now)}")

    def _edges(self) -> Iterator[tuple[float, bool, str, Run]]:
        """Begin and end of what counts, of every operation. Ends come first where times are equal."""
        for operation, runs in self._runs.items():
            for run, successor in itertools.zip_longest(runs, runs[1:]):
                over_ns = run.over_ns
                if successor is not None and successor.started.time_ns >= run.started.time_ns:
                    over_ns = min(over_ns, successor.started.time_ns)
                silent_ns = run.alive_ns + self._timeout_ns
                if run.frozen_at(silent_ns):
                    over_ns = min(over_ns, silent_ns)
                if over_ns > run.started.time_ns:
                    yield run.started.time_ns, True, operation, run
                    yield over_ns, False, operation, run

    # One operation

    def _check_operation(self, operation: str) -> None:
        enqueued, row = self._enqueued.get(operation), self._final.operations.get(operation)
        runs = self._runs.get(operation, [])
        self._verdict.looked["operations"] += 1
        if enqueued is None or row is None:
            missing = "was never enqueued" if enqueued is None else "is in no table"
            self._violated("lost", f"operation {operation} {missing}")
            return
        plan = PLANS[enqueued.plan]
        if row.state != plan.state:
            self._violated("lost", f"operation {operation} ({enqueued.plan}) is {row.state} instead of {plan.state}")
            return
        for run, successor in itertools.pairwise(runs):
            self._check_overlap(run, successor)
        self._check_attempts(operation, row, runs)
        self._check_repeats(operation, enqueued, runs)
        self._check_ends(operation, enqueued, row, runs)

    def _check_attempts(self, operation: str, row: FinalOperation, runs: Sequence[Run]) -> None:
        """Each attempt has one run, in order, and the row knows the last."""
        attempts = [run.started.attempt for run in runs]
        if any(later <= earlier for earlier, later in itertools.pairwise(attempts)):
            self._violated("twice", f"operation {operation}: the attempts that ran are {attempts}")
        if attempts and attempts[-1] > row.attempt:
            self._violated("stale", f"operation {operation}: attempt {attempts[-1]} ran, the row knows {row.attempt}")

    def _check_overlap(self, run: Run, successor: Run) -> None:
        begins_ns, operation = successor.started.time_ns, run.started.operation
        silent_ns = run.alive_ns + self._timeout_ns
        if run.over_ns <= begins_ns:
            return
        who = f"operation {operation}: attempt {successor.started.attempt} began beside {run.started.attempt}"
        if run.killed_ns is None and not run.frozen_at(begins_ns) and not self._reasons.stalled(run):
            self._violated("overlap", f"{who}, which nothing had stopped")
        elif begins_ns < silent_ns:
            early_s = (silent_ns - begins_ns) / NANOSECONDS
            self._violated("overlap", f"{who}, {early_s:.2f} s before its heartbeat timeout was over")
        elif run.ended is not None and not run.frozen_at(run.ended.time_ns) and run.killed_ns is None:
            self._violated("overlap", f"{who}, which went on for more than {WAKES_S:g} s after it was continued")

    def _check_repeats(self, operation: str, enqueued: Enqueued, runs: Sequence[Run]) -> None:
        """What ran more often than planned has a fault of its own for each time."""
        self._verdict.looked["once"] += 1
        extra = len(runs) - len(PLANS[enqueued.plan].ends)
        if extra <= 0:
            return
        self._verdict.looked["again"] += 1
        reasons = [reason for run, later in itertools.pairwise(runs) if (reason := self._reasons.explain(run, later))]
        self._verdict.explained.update(reasons[:extra])
        if len(reasons) < extra:
            ends = [None if run.ended is None else run.ended.how for run in runs]
            self._violated(
                "unexplained",
                f"operation {operation} ({enqueued.plan}) ran {len(runs)} times, and faults explain {len(reasons)} "
                f"of {extra} repeats; its bodies ended: {ends}",
            )

    def _check_ends(self, operation: str, enqueued: Enqueued, row: FinalOperation, runs: Sequence[Run]) -> None:
        """Every body ended or was killed, and the outcome that stands is the newest run's."""
        for run in runs:
            if math.isinf(run.over_ns):
                self._violated("unfinished", f"operation {operation}: attempt {run.started.attempt} never ended")
        plan = PLANS[enqueued.plan]
        if plan.cut_short:
            return
        if len(runs) < len(plan.ends):
            self._violated("lost", f"operation {operation} is {row.state} after {len(runs)} of {len(plan.ends)} runs")
            return
        last = runs[-1]
        how = None if last.ended is None else last.ended.how
        if how != plan.ends[-1]:
            self._violated("outcome", f"operation {operation} is {row.state}, and its last body ended: {how}")
        elif row.state == SUCCEEDED:
            self._verdict.looked["results"] += 1
            if row.result != last.started.token or row.attempt != last.started.attempt:
                self._violated("stale", f"operation {operation}: the result is not that of its newest run")

    # Processes

    def _check_exits(self) -> None:
        """No process ended by itself, but one that started while its database was away, or by Celery's own mistake."""
        away = [
            (fault.time_ns, over_ns + START_S * NANOSECONDS)
            for fault, over_ns in fault_spans(self._events)
            if fault.kind in DATABASE_FAULTS
        ]
        for event in self._events:
            if not isinstance(event, Exited) or event.said.endswith(CELERYS_OWN):
                continue
            if not any(begin <= event.time_ns <= end for begin, end in away):
                self._violated("exit", f"{event.target} ended by itself with code {event.code}")

    # At rest

    def _check_rest(self) -> None:
        final = self._final
        try:
            self._invariants.quiet(final.footprint, final.in_use, final.waiting, final.left)
        except InvariantViolation as error:
            self._violated("rest", str(error))
        self._verdict.looked["states"] += sum(final.states.values())
        if sum(final.states.values()) != len(self._enqueued):
            counts = dict(sorted(final.states.items()))
            self._violated("total", f"{len(self._enqueued)} were enqueued, the states add up to {counts}")
