"""What happened, told by those to whom it happened: one JSON line an event.

Times are of CLOCK_MONOTONIC, which all processes of the machine share.
Bodies write their own starts and ends, workers the heartbeats and settles that succeeded, the driver what it enqueued,
which faults it made, and at the end what SQL says. Nobody reads the file before the run is over.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.example.records import whole_lines

NANOSECONDS = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something at an instant."""

    time_ns: int = field(default_factory=time.monotonic_ns)


@dataclass(frozen=True, kw_only=True)
class Enqueued(Event):
    """The driver's call of a task was committed."""

    operation: str
    service: str
    plan: str
    """How it is to go: a key of :data:`tests.chaos.plans.PLANS`."""
    account: str
    group: str = ""


@dataclass(frozen=True, kw_only=True)
class Started(Event):
    """A body began."""

    operation: str
    token: str
    attempt: int
    service: str
    account: str
    group: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class Ended(Event):
    """A body ended. ``how``: returned, failed, retry, aborted, died (the last thing before it kills its process)."""

    operation: str
    token: str
    how: str


@dataclass(frozen=True, kw_only=True)
class Settled(Event):
    """A worker's settle of a body's own outcome was committed. A body that was stopped as lost has none."""

    operation: str
    token: str


@dataclass(frozen=True, kw_only=True)
class Beat(Event):
    """A start or heartbeat of a worker succeeded; the time is when it was begun, so the row is alive from then on."""

    operation: str
    token: str


@dataclass(frozen=True, kw_only=True)
class Fault(Event):
    """The driver did something bad, now or until :class:`FaultOver`."""

    number: int
    kind: str
    target: str
    pids: tuple[int, ...] = ()
    """The processes that it hit."""
    main_only: bool = False
    """The signal went to the first of them alone; the others may outlive it for a moment."""


@dataclass(frozen=True, kw_only=True)
class FaultOver(Event):
    """What a fault took is back: continued, started again, answering."""

    number: int


@dataclass(frozen=True, kw_only=True)
class Exited(Event):
    """A process ended, and no fault had ended it."""

    target: str
    code: int
    said: str = ""
    """The last critical line of its log."""


@dataclass(frozen=True, kw_only=True)
class Stall(Event):
    """The machine, or a database, kept the driver waiting for ``lasted_s`` until now: no fault of ours."""

    what: str
    lasted_s: float
    service: str = ""
    """Whose database it was; empty: the machine's, and so everybody's."""


@dataclass(frozen=True)
class FinalOperation:
    """An operation's row at the end."""

    service: str
    state: str
    attempt: int
    result: str | None = None
    """The token that its body returned."""


@dataclass(frozen=True, kw_only=True)
class Final(Event):
    """What SQL and the holder said when all was over."""

    operations: Mapping[str, FinalOperation]
    states: Mapping[str, int]
    """How many operations were in each state, in all services together."""
    in_use: int
    waiting: int
    footprint: int
    left: Sequence[str] = ()
    """Rows of outboxes, accounts and wakes that should have been gone."""


TYPES: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (Enqueued, Started, Ended, Settled, Beat, Fault, FaultOver, Exited, Stall, Final)
}


def write(path: Path, *events: Event) -> None:
    """Appends the events by a single write, so that lines of several processes never mix."""
    lines = "".join(json.dumps({"event": type(event).__name__, **asdict(event)}) + "\n" for event in events)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(handle, lines.encode())
    finally:
        os.close(handle)


def parse(lines: Iterable[str]) -> list[Event]:
    """The events of the lines, ordered by time."""
    events = [_event(json.loads(line)) for line in lines]
    return sorted(events, key=lambda event: event.time_ns)


def read(path: Path) -> list[Event]:
    """The events of the file, ordered by time."""
    return parse(whole_lines(path))


def _event(document: dict[str, Any]) -> Event:
    kind = TYPES[document.pop("event")]
    if "pids" in document:
        document["pids"] = tuple(document["pids"])
    if kind is Final:
        document["operations"] = {name: FinalOperation(**row) for name, row in document["operations"].items()}
    return kind(**document)
