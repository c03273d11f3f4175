"""What the simulator looks at after every commit: the rows of all databases, by what must hold of them.

Where the bound cannot be promised by design, exactly that is excepted: operations in use or admitted by a service that
was forfeited though it runs, or restored from a backup, or left out by an operator's ``go``, from that moment until the
service has acknowledged what the holder decided then.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from celery_durable.permits.messages import MAX_INT
from celery_durable.store.schema import (
    CANCELLED,
    ENDED_STATES,
    FAILED,
    PERMIT_STATES,
    RUNNING,
    SUCCEEDED,
    WAITING_STATES,
)
from holder_service.account import AccountState
from holder_service.footprint import footprint
from holder_service.semaphore import group_limits_in_force, limit_in_force
from tests.invariants import Pair
from tests.simulation.databases import holder_slot
from tests.simulation.services import Service
from tests.simulation.workers import Worker

if TYPE_CHECKING:
    from tests.simulation.shells import World

PASSED_OVER_MAX = 8
"""How many others may be admitted while a pair waits, where two race for one permit and nothing goes wrong."""

SERVED_MAX = 3
"""How often every other pair of an account may be served, on the average, while one wants something and has nothing."""

ALL_CHECKS = (
    *("bound", "group bound", "level", "ceiling", "covers", "ack", "seq", "version", "epoch", "offset", "attempt"),
    *("fenced", "read once", "at its version", "noticed", "one body", "ended stays", "kept", "all ran", "quiescence"),
    *("rows", "starves", "passed over", "overdue", "right end", "over", "bodies", "group bodies", "caused"),
)
"""What the simulation looks at. Each has a mutation that turns it red, and a run that looked at nothing fails."""

_OPERATIONS = (
    'SELECT id, account, "group", state, generation, attempt, run_token, alive_until, worker_losses '
    "FROM durable_operations"
)
_ACCOUNTS = "SELECT account, state FROM durable_accounts"
_SEQ = "SELECT value FROM durable_counters WHERE name = 'report_seq'"

_OFFSETS = "SELECT topic, topic_id, partition, next_offset FROM holder_offsets"


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
class Lax:
    """From when on the bound counts what this service has in this account again: once it acknowledged ``position``."""

    position: tuple[int, int] | None = None
    after_seq: int | None = None
    """The position is that of the reply to the first report above this one."""
    while_copied: bool = False
    """Not before the copy of its database is gone."""
    of_new_epoch: bool = False
    """The position is the epoch that the holder is about to begin."""


@dataclass(slots=True)
class ServiceView:
    """A service's database as it was seen last."""

    changes: int = -1
    rows: dict[str, Row] = field(default_factory=dict)
    signs: dict[str, Signs] = field(default_factory=dict)
    acks: dict[str, tuple[int, int] | None] = field(default_factory=dict)
    """By account that has a row."""
    lives: Counter[str] = field(default_factory=Counter)


class Checks:
    """Looks at the databases."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.invariants = world.invariants
        self.views: dict[str, ServiceView] = {}
        self.exempt: set[tuple[str, str]] = set()
        self.lax: dict[tuple[str, str], Lax] = {}
        self.forfeited: set[tuple[str, str, str]] = set()
        """What operators commanded: account, client, incarnation."""
        self.states: dict[str, AccountState] = {}
        self.phase: str | None = None
        self.epoch = 0
        self.trusted_epoch = 0
        """From this epoch on the holder's database counts as true; below, it is an old copy, not noticed yet."""
        self.allowed: dict[str, int] = {}
        self.allowed_groups: dict[tuple[str, str], int] = {}
        self.changed = True
        self.holder_life = 0
        self._holder_changes = -1
        self._versions: dict[str, tuple[int, int]] = {}

    def look(self) -> None:
        """Looks at what has changed since the last time."""
        changed = False
        for service in self.world.services:
            view = self.views.setdefault(service.name, ServiceView())
            if service.slot.raw.total_changes != view.changes:
                view.changes = service.slot.raw.total_changes
                self._look_at_service(service, view)
                changed = True
        raw = holder_slot().raw
        if raw.total_changes != self._holder_changes:
            self._holder_changes = raw.total_changes
            self._look_at_holder()
            changed = True
        if changed:
            self.changed = True
            self._bound()
            self.world.runs.bound()

    # A service

    def _look_at_service(self, service: Service, view: ServiceView) -> None:
        signs = view.signs
        rows, view.signs = _operations(service)
        admitted = []
        if rows != view.rows:
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
        self._accounts(service, view, admitted)
        for row in admitted:
            if row.account is not None and (service.name, row.account) in self.lax:
                self.exempt.add((service.name, row.id))
        for key in [key for key in self.exempt if key[0] == service.name]:
            if key[1] not in rows or rows[key[1]].state not in PERMIT_STATES:
                self.exempt.discard(key)
        if admitted and self.world.races:
            self._fairness(service, admitted)

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
            self.invariants.overdue(who, before.alive_until_ms, self.world.clock.now_ms)
        if new.state == CANCELLED:
            self.invariants.right_end(who, new.state, new.id in self.world.cancelled)
        elif new.state == FAILED:
            lost_too_often = not ending and after.worker_losses > service.runtime.settings.max_worker_losses
            self.invariants.right_end(who, new.state, ending == "fail" or lost_too_often)
        elif new.state == SUCCEEDED:
            self.invariants.right_end(who, new.state, ending == "succeed")

    def _accounts(self, service: Service, view: ServiceView, admitted: list[Row]) -> None:
        acks: dict[str, tuple[int, int] | None] = {}
        for account, text in service.slot.rows(_ACCOUNTS):
            ack = json.loads(text).get("k")
            acks[account] = None if ack is None else (ack[0], ack[1])
        for account, known in acks.items():
            if account not in view.acks or (known is None and view.acks[account] is not None):
                view.lives[account] += 1
            if known is not None:
                life = f"{service.name} {service.slot_life} {account} row {view.lives[account]}"
                self.invariants.grows("ack", life, known)
        view.acks = acks
        seq = service.slot.rows(_SEQ)[0][0]
        self.invariants.grows("seq", f"{service.name} {service.slot_life}", (seq,))
        for key in [key for key in self.lax if key[0] == service.name]:
            lax, row_ack = self.lax[key], acks.get(key[1])
            if lax.while_copied:
                continue
            if key[1] not in acks or (lax.position is not None and row_ack is not None and row_ack >= lax.position):
                self.world.note("exception", *key, "is over")
                del self.lax[key]

    def _fairness(self, service: Service, admitted: list[Row]) -> None:
        for row in admitted:
            waiting = {
                (name, other.group)
                for name, view in self.views.items()
                for other in view.rows.values()
                if other.account == row.account and other.state in WAITING_STATES
            }
            self.invariants.admitted((service.name, row.group), sorted(waiting), most=PASSED_OVER_MAX)

    def except_service(self, service: Service, account: str, lax: Lax) -> None:
        """The bound does not count what this service has in use there, nor what it admits until it has acknowledged."""
        view = self.views.get(service.name)
        rows = {} if view is None else view.rows
        self.world.note("exception", service.name, account)
        self.world.stats["exceptions"] += 1
        for row in rows.values():
            if row.account == account and row.state in PERMIT_STATES:
                self.exempt.add((service.name, row.id))
        known = self.lax.get((service.name, account))
        if known is not None and known.while_copied:
            known.after_seq = max(known.after_seq or 0, lax.after_seq or 0)
            return
        if lax.while_copied or (view is not None and account in view.acks):
            self.lax[service.name, account] = lax

    def restore_service(self, service: Service, content: bytes) -> None:
        """The service's database becomes an older copy, in which it knows less than was told of it."""
        seq = service.slot.rows(_SEQ)[0][0]
        service.slot.load(content)
        service.slot_life += 1
        view = self.views[service.name] = ServiceView()
        view.lives = Counter()
        view.changes = service.slot.raw.total_changes
        view.rows, view.signs = _operations(service)
        self._accounts(service, view, [])
        self.world.note("fault", service.name, "is restored from a backup")
        self.world.runs.replaced(service)
        for account in self.world.accounts:
            self.except_service(service, account, Lax(after_seq=seq))

    def voided(self, service: Service) -> None:
        """The service begins anew in each account, and may read old replies again before anybody looks."""
        view = self.views.setdefault(service.name, ServiceView())
        for account in self.world.accounts:
            view.lives[account] += 1

    def copied(self, first: Service, second: Service) -> None:
        """``second`` runs on a copy of the database of ``first``: the holder takes each for the other.

        Nothing is promised of these two; the others, and all that the two have in the end, keep their bounds.
        """
        view = self.views[second.name] = ServiceView()
        view.changes = second.slot.raw.total_changes
        view.rows, view.signs = _operations(second)
        self.world.runs.copied(first, second)
        for service in (first, second):
            for account in self.world.accounts:
                self.except_service(service, account, Lax(while_copied=True))

    def copy_ended(self, first: Service, second: Service) -> None:
        """The copy is gone: the service counts again in each account once it has acknowledged what came after both."""
        seq = max(service.slot.rows(_SEQ)[0][0] for service in (first, second))
        for account in self.world.accounts:
            known = self.lax.pop((first.name, account), Lax())
            self.except_service(first, account, Lax(after_seq=max(seq, known.after_seq or 0)))

    def holder_replaced(self) -> None:
        """The holder's database is new, or an older copy of itself."""
        self.holder_life += 1
        self._holder_changes = -1
        self.look()

    # The holder

    def _look_at_holder(self) -> None:
        slot = holder_slot()
        life = slot.rows("SELECT epoch, phase FROM holder_database")
        self.epoch, self.phase = life[0] if life else (0, None)
        if life:
            self.invariants.grows("epoch", f"holder database {self.holder_life}", (self.epoch,))
        before, self.states = self.states, {}
        for account, version, text in slot.rows("SELECT account, version, state FROM holder_accounts"):
            known = before.get(account)
            if known is not None and self._versions.get(account) == (self.holder_life, version):
                self.states[account] = known
                continue
            self._versions[account] = (self.holder_life, version)
            state = self.states[account] = AccountState.from_json(text)
            self.invariants.grows("version", f"{account} of holder database {self.holder_life}", (version,))
            self._note_state(state)
            self._follow_exceptions(known, state)
            if known is not None and known.epoch == state.epoch:
                self._follow_service(known, state)
                self._follow_lowered(known, state)
        self._follow_limits()
        for topic, topic_id, partition, offset in slot.rows(_OFFSETS):
            if self.world.bus.topics[topic].topic_id != topic_id:
                continue  # made anew a moment ago: its reader learns so within 10 s
            self.invariants.grows("offset", f"{topic_id} {partition} of holder database {self.holder_life}", (offset,))

    def _note_state(self, state: AccountState) -> None:
        used = {
            f"{name}/{group}": (pair.used, footprint(client, pair), pair.waiting)
            for name, client in state.clients.items()
            for group, pair in client.pairs.items()
        }
        flags = [name for name, client in state.clients.items() if client.unknown]
        self.world.note("holder", state.account, state.epoch, state.version, used, flags)

    def _follow_service(self, before: AccountState, state: AccountState) -> None:
        """Who was given something by this decision, and whom it passed over that wants something and has nothing."""
        served, hungry = set(), set()
        limit_of = group_limits_in_force(state, self.world.semaphore_settings)
        for name, client in state.clients.items():
            old = before.clients.get(name)
            for group, pair in client.pairs.items():
                if client.forfeited or (limit_of(group) is not None and limit_of(group) != limit_of("")):
                    continue  # a full group waits for itself alone
                counted = footprint(client, pair)
                if counted and pair.served == state.version:
                    served.add((name, group))
                known = None if old is None else old.pairs.get(group)
                if pair.waiting and not counted and known is not None and known.waiting:
                    hungry.add((name, group))
        most = SERVED_MAX * sum(len(client.pairs) for client in state.clients.values())
        self.invariants.served(state.account, served, hungry, most=most)

    def _follow_lowered(self, before: AccountState, state: AccountState) -> None:
        """While more is counted than the limit lets through, as after it was lowered, nobody is given more."""
        if before.waits_for_epoch or state.waits_for_epoch:
            return
        limit = limit_in_force(state, self.world.semaphore_settings).limit
        counted = sum(self.footprints(state).values())
        for name, client in state.clients.items():
            old = before.clients.get(name)
            for group, pair in client.pairs.items():
                known = None if old is None else old.pairs.get(group)
                given = 0 if known is None else known.newest.permits
                self.invariants.not_over(state.account, counted, limit, pair.newest.permits - given)

    def _follow_exceptions(self, before: AccountState | None, state: AccountState) -> None:
        for name, client in state.clients.items():
            old = None if before is None else before.clients.get(name)
            for service in self.world.services:
                if service.client_id != name:
                    continue
                incarnation = service.incarnation()
                if incarnation != client.incarnation:
                    # Another one has its place already, if one batch, or a rebuild, read both.
                    if (state.account, name, incarnation) in self.forfeited:
                        self.forfeited.discard((state.account, name, incarnation))
                        self.except_service(service, state.account, Lax((state.epoch, state.version)))
                    continue
                if client.forfeited and not (old is not None and old.forfeited):
                    position = (state.epoch, state.version)
                    self.except_service(service, state.account, Lax(position))
                lax = self.lax.get((service.name, state.account))
                if lax is None or lax.position is not None or lax.after_seq is None:
                    continue
                if client.seq > lax.after_seq:
                    lax.position = (state.epoch, state.version)
        if self.phase == "ready":
            for lax in self.lax.values():
                if lax.of_new_epoch:
                    lax.position, lax.of_new_epoch = (self.epoch, 0), False

    @property
    def is_sure(self) -> bool:
        """Whether the holder's database is what counts, and not an old copy, or one that is being rebuilt."""
        return self.phase == "ready" and self.epoch >= self.trusted_epoch

    def _follow_limits(self) -> None:
        """The limits that bind: a lowered one does so only once what is given fits; it revokes nothing."""
        settings = self.world.semaphore_settings
        for account, state in self.states.items():
            limit = limit_in_force(state, settings).limit
            sure = self.is_sure and not state.waits_for_epoch
            footprints = self.footprints(state)
            fits = sure and sum(footprints.values()) <= limit
            self.allowed[account] = limit if fits else max(self.allowed.get(account, 0), limit)
            limit_of = group_limits_in_force(state, settings)
            for group in self.world.groups:
                of_group = limit_of(group)
                bound = MAX_INT if of_group is None else of_group
                given = sum(count for (_, name), count in footprints.items() if name == group)
                known = self.allowed_groups.get((account, group), 0)
                self.allowed_groups[account, group] = bound if sure and given <= bound else max(known, bound)

    def footprints(self, state: AccountState) -> dict[Pair, int]:
        """What the holder counts for each pair."""
        return {
            (name, group): footprint(client, pair)
            for name, client in state.clients.items()
            for group, pair in client.pairs.items()
        }

    # All of them

    def in_use(self, *, counted: bool = True) -> dict[str, dict[Pair, int]]:
        """Operations that hold a permit, by account and pair; ``counted``: without those that are excepted."""
        found: dict[str, dict[Pair, int]] = {account: {} for account in self.world.accounts}
        for service in self.world.services:
            view = self.views.get(service.name)
            for row in () if view is None else view.rows.values():
                if row.account is None or row.state not in PERMIT_STATES:
                    continue
                if counted and (service.name, row.id) in self.exempt:
                    continue
                pairs = found[row.account]
                pair = (service.name, row.group)
                pairs[pair] = pairs.get(pair, 0) + 1
        return found

    def _bound(self) -> None:
        in_use = self.in_use()
        for account, pairs in in_use.items():
            if not pairs:
                continue
            group_limits = {group: limit for (of, group), limit in self.allowed_groups.items() if of == account}
            self.invariants.bound(pairs, self.allowed.get(account, 0), group_limits)
            state = self.states.get(account)
            if self.is_sure and (state is None or not state.waits_for_epoch):
                counted = {} if state is None else self.footprints(state)
                self.invariants.covers(counted, self._by_client(pairs))

    def _by_client(self, pairs: dict[Pair, int]) -> dict[Pair, int]:
        names = {service.name: service.client_id for service in self.world.services}
        found: dict[Pair, int] = {}
        for (name, group), count in pairs.items():
            pair = (names[name], group)
            found[pair] = found.get(pair, 0) + count
        return found


def _operations(service: Service) -> tuple[dict[str, Row], dict[str, Signs]]:
    found = service.slot.rows(_OPERATIONS)
    return {row[0]: Row(*row[:7]) for row in found}, {row[0]: Signs(*row[7:]) for row in found}
