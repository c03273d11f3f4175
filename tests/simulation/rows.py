"""The operations of a service's database as they were seen last, and what must hold of what has changed since."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from celery_durable.store.schema import CANCELLED, ENDED_STATES, FAILED, PERMIT_STATES, RUNNING, SUCCEEDED
from tests.simulation.workers import Worker

if TYPE_CHECKING:
    from tests.simulation.services import Service
    from tests.simulation.shells import World

_OPERATIONS = (
    'SELECT id, account, "group", state, generation, attempt, run_token, alive_until, worker_losses '
    "FROM durable_operations"
)


class Row(NamedTuple):
    """One operation."""

    id: str
    account: str | None
    group: str
    state: str
    generation: int
    attempt: int
    token: str | None


class Signs(NamedTuple):
    """What else a row says of an operation; it changes too often for the log."""

    alive_until_ms: int | None
    worker_losses: int


_NO_SIGNS = Signs(None, 0)


@dataclass(slots=True)
class ServiceView:
    """A service's database as it was seen last."""

    changes: int = -1
    rows: dict[str, Row] = field(default_factory=dict)
    signs: dict[str, Signs] = field(default_factory=dict)
    acks: dict[str, tuple[int, int] | None] = field(default_factory=dict)
    """By account that has a row."""
    lives: Counter[str] = field(default_factory=Counter)
    seq: int = 0
    """The newest ``seq`` that it drew."""


class Rows:
    """Looks at the operations of all services."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.invariants = world.invariants

    def look(self, service: Service, view: ServiceView) -> list[Row]:
        """Brings the view up to date. Returns what has been admitted."""
        signs = view.signs
        rows, view.signs = operations(service)
        admitted: list[Row] = []
        if rows == view.rows:
            return admitted
        before, view.rows = view.rows, rows
        for key, row in rows.items():
            old = before.get(key)
            if old is not None and old.state in ENDED_STATES:
                self.invariants.ended_stays(f"{service.name} {key}", old.state, row.state, ENDED_STATES)
            if old is not row and old != row:
                self.world.note("row", service.name, *row)
                if old is not None:
                    self._moved(service, old, row)
                    self._ended(service, old, row, signs.get(key, _NO_SIGNS), view.signs[key])
                if row.state in PERMIT_STATES and (old is None or old.state not in PERMIT_STATES):
                    admitted.append(row)
        for key, old in before.items():
            if key not in rows:
                self.invariants.kept(f"{service.name} {key}", old.state, ENDED_STATES)
        return admitted

    def _moved(self, service: Service, old: Row, new: Row) -> None:
        who = f"{service.name} {new.id}"
        self.invariants.grows("attempt", f"{who} {service.slot_life}", (new.generation, new.attempt))
        process = self.world.current
        if not isinstance(process, Worker) or process.acting is None:
            started = new.state == RUNNING and old.state != RUNNING
            self.invariants.fenced(who, not started, f"started, and not by a worker ({old} -> {new})")
            return
        attempt = process.acting
        mine = new.id == attempt.id and (
            (old.state == RUNNING and old.token == attempt.token)
            or (old.state == "admitted" and (old.generation, old.attempt) == (attempt.generation, attempt.attempt))
        )
        self.invariants.fenced(who, mine, f"{process.name} changed it under token {attempt.token}: {old} -> {new}")

    def _ended(self, service: Service, old: Row, new: Row, before: Signs, after: Signs) -> None:
        """An attempt that is taken from a worker was overdue; an operation ends as it was to end."""
        if new.state == old.state:
            return
        who, process = f"{service.name} {new.id}", self.world.current
        ending = process.ending if isinstance(process, Worker) else ""
        if old.state == RUNNING and not ending:
            self.invariants.overdue(who, before.alive_until_ms, self.world.clock.now_ms + service.slot.skew_ms)
        if new.state == CANCELLED:
            self.invariants.right_end(who, new.state, new.id in self.world.cancelled)
        elif new.state == FAILED:
            lost_too_often = ending in ("", "lose") and after.worker_losses > service.runtime.settings.max_worker_losses
            self.invariants.right_end(who, new.state, ending == "fail" or lost_too_often)
        elif new.state == SUCCEEDED:
            self.invariants.right_end(who, new.state, ending == "succeed")


def operations(service: Service) -> tuple[dict[str, Row], dict[str, Signs]]:
    """All that its database has now."""
    found = service.slot.rows(_OPERATIONS)
    return {row[0]: Row(*row[:7]) for row in found}, {row[0]: Signs(*row[7:]) for row in found}
