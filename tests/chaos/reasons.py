"""What explains that a body was run again: a fault of its own process or of its own database, in its own time. Pure.

An attempt that was settled has nothing that explains a repeat. Any other is made again only because it was not renewed
for its heartbeat timeout: its process was killed before that was over, or could not renew it for most of it. Celery's
broker, Kafka, dispatchers and holders explain nothing: an attempt that has begun does not need them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.chaos.bodies import DIES, Run, fault_spans
from tests.chaos.history import NANOSECONDS, Event, Stall

POSTGRESQL_RESTART = "postgresql-restart"
STALL = "a stall of the machine or its database"
FREEZE = "freeze"
LATE = 0.85
"""Of a heartbeat timeout. An attempt stops itself when nine tenths of it are over without a heartbeat; a little less,
by the times that a history has."""
SAME_MOMENT = 0.1
"""The same. Within it a heartbeat may still succeed beside the stop."""
MOST = 0.5
"""Of a heartbeat timeout. Who could renew for as long does so: a heartbeat is due after a fifth."""

Span = tuple[float, float]


class Reasons:
    """The faults of a history, as reasons."""

    def __init__(self, events: Sequence[Event], *, heartbeat_timeout_s: float) -> None:
        self._timeout_ns = heartbeat_timeout_s * NANOSECONDS
        self._restarts: list[Span] = [
            (fault.time_ns, over) for fault, over in fault_spans(events) if fault.kind == POSTGRESQL_RESTART
        ]
        self._stalls = [event for event in events if isinstance(event, Stall)]

    def explain(self, run: Run, successor: Run) -> str | None:
        """Why the run was made again; None: nothing explains it."""
        if run.settled:
            return None
        silent_ns, next_ns = run.alive_ns + self._timeout_ns, successor.started.time_ns
        dies = run.killed_by == DIES
        if run.killed_ns is not None and run.begun_ns <= run.killed_ns <= min(silent_ns, next_ns):
            # Its own death is planned; that of another body of its process is not.
            return None if dies and run.ended is not None and run.ended.how == "died" else run.killed_by
        hindered = {
            FREEZE: run.frozen,
            POSTGRESQL_RESTART: self._restarts,
            STALL: self._stalls_of(run),
        }
        covered = {kind: self._covered(run, spans) for kind, spans in hindered.items()}
        together = [span for spans in hindered.values() for span in spans]
        if self._covered(run, together) < MOST * self._timeout_ns:
            return None
        return max(covered, key=lambda kind: covered[kind])

    def stalled(self, run: Run) -> bool:
        """Whether the machine, or the run's database, stood still for most of the run's heartbeat timeout."""
        return self._covered(run, self._stalls_of(run)) >= MOST * self._timeout_ns

    def _stalls_of(self, run: Run) -> list[Span]:
        return [
            (stall.time_ns - stall.lasted_s * NANOSECONDS, stall.time_ns)
            for stall in self._stalls
            if stall.service in ("", run.started.service)
        ]

    def _covered(self, run: Run, spans: Iterable[Span]) -> float:
        """For how many ns of the timeout after the last heartbeat in time one of the spans hindered another."""
        alive_ns = self._alive_ns(run)
        covered, until_ns = 0.0, float(alive_ns)
        silent_ns = alive_ns + self._timeout_ns
        for begin_ns, end_ns in sorted(spans):
            length_ns = min(end_ns, silent_ns) - max(begin_ns, until_ns)
            if length_ns > 0:
                covered += length_ns
                until_ns = end_ns
        return covered

    def _alive_ns(self, run: Run) -> float:
        """The run's last heartbeat before it was to stop: one that came as it stopped itself was not heeded."""
        if run.ended is None or run.ended.how != "aborted" or len(run.beats_ns) < 2:
            return run.alive_ns
        heeded_ns, last_ns = run.beats_ns[-2:]
        stopped_ns = heeded_ns + LATE * self._timeout_ns
        came_late = stopped_ns <= last_ns and run.ended.time_ns <= last_ns + SAME_MOMENT * self._timeout_ns
        return heeded_ns if came_late and stopped_ns <= run.ended.time_ns else last_ns
