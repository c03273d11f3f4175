"""Histories of chaos runs made by hand, for the tests of what judges them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

from tests.chaos.checker import Verdict, check
from tests.chaos.history import Beat, Ended, Enqueued, Event, Fault, FaultOver, Final, FinalOperation, Settled, Started
from tests.chaos.plans import PLANS

TIMEOUT_S = 4.0
ACCOUNT, GROUP = "shared:acme~2", "wf~1"


def ns(seconds: float) -> int:
    return round(seconds * 1e9)


@dataclass
class Scene:
    """A history and its end, as they should be unless a test spoils them. Times in seconds."""

    events: list[Event] = field(default_factory=list)
    rows: dict[str, FinalOperation] = field(default_factory=dict)
    final: Final = field(
        default_factory=lambda: Final(operations={}, states={}, in_use=0, waiting=0, footprint=0, time_ns=ns(1_000_000))
    )
    faults: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def operation(
        self,
        name: str,
        *runs: tuple[float, float | None, str],
        plan: str = "succeed",
        account: str = ACCOUNT,
        group: str = "",
        pids: tuple[int, ...] = (),
    ) -> None:
        """An operation whose bodies ran from, to (None: it never said so), and how they ended."""
        self.events.append(Enqueued(operation=name, service="a", plan=plan, account=account, group=group, time_ns=0))
        for number, (begin, end, how) in enumerate(runs, start=1):
            token, pid = f"{name}-{number}", pids[number - 1] if pids else 1000 + number
            self.events += [
                Beat(operation=name, token=token, time_ns=ns(begin - 0.01)),
                Started(
                    operation=name,
                    token=token,
                    attempt=number,
                    service="a",
                    account=account,
                    group=group,
                    pid=pid,
                    time_ns=ns(begin),
                ),
            ]
            if end is not None:
                self.events.append(Ended(operation=name, token=token, how=how, time_ns=ns(end)))
        state = PLANS[plan].state
        result = f"{name}-{len(runs)}" if state == "succeeded" else None
        self.rows[name] = FinalOperation("a", state, len(runs), result)

    def fault(self, kind: str, begin: float, end: float | None = None, *, pids: tuple[int, ...] = ()) -> None:
        number = next(self.faults)
        self.events.append(Fault(number=number, kind=kind, target="some", pids=pids, time_ns=ns(begin)))
        if end is not None:
            self.events.append(FaultOver(number=number, time_ns=ns(end)))

    def only_beat(self, token: str, at: float) -> None:
        """The run's last heartbeat, and its first."""
        self.events = [event for event in self.events if not (isinstance(event, Beat) and event.token == token)]
        self.beat(token, at)

    def beat(self, token: str, at: float) -> None:
        self.events.append(Beat(operation=token.rpartition("-")[0], token=token, time_ns=ns(at)))

    def settle(self, token: str, at: float) -> None:
        self.events.append(Settled(operation=token.rpartition("-")[0], token=token, time_ns=ns(at)))

    def spoil(self, name: str, **changes: object) -> None:
        self.rows[name] = replace(self.rows[name], **changes)  # type: ignore[arg-type]

    def check(self) -> Verdict:
        states: dict[str, int] = {}
        for row in self.rows.values():
            states[row.state] = states.get(row.state, 0) + 1
        final = replace(self.final, operations=self.rows, states=self.final.states or states)
        events = sorted([*self.events, final], key=lambda event: event.time_ns)
        return check(events, heartbeat_timeout_s=TIMEOUT_S)


def kinds(verdict: Verdict) -> set[str]:
    return {violation.kind for violation in verdict.violations}
