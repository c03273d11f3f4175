"""What the simulator looks at after every commit: the rows of all databases, by what must hold of them.

Where the bound cannot be promised by design, exactly that is excepted: operations in use or admitted by a service that
was forfeited though it runs, or restored from a backup, or left out by an operator's ``go``, from that moment until the
service has acknowledged what the holder decided then.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from celery_durable.store.schema import PERMIT_STATES, WAITING_STATES
from holder_service.account import AccountState
from tests.invariants import Pair
from tests.simulation.holder_view import HolderView
from tests.simulation.rows import Row, Rows, ServiceView, operations
from tests.simulation.services import Service

if TYPE_CHECKING:
    from tests.simulation.shells import World

PASSED_OVER_MAX = 8
"""How many others may be admitted while a pair waits, where two race for one permit and nothing goes wrong."""

ALL_CHECKS = (
    *("bound", "group bound", "level", "ceiling", "covers", "ack", "seq", "version", "epoch", "offset", "attempt"),
    *("fenced", "read once", "at its version", "noticed", "one body", "ended stays", "kept", "all ran", "quiescence"),
    *("rows", "starves", "passed over", "overdue", "right end", "over", "bodies", "group bodies", "caused"),
    "told",
)
"""What the simulation looks at. Each has a mutation that turns it red, and a run that looked at nothing fails."""

RESTORED_SEQS = 1_000
"""A database that finds itself restored moves its counter by more than this; no transaction draws so many."""

_ACCOUNTS = "SELECT account, state FROM durable_accounts"
_SEQ = "SELECT value FROM durable_counters WHERE name = 'report_seq'"


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


class Checks:
    """Looks at the databases."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.invariants = world.invariants
        self._rows = Rows(world)
        self.holder = HolderView(world)
        self.views: dict[str, ServiceView] = {}
        self.exempt: set[tuple[str, str]] = set()
        self.lax: dict[tuple[str, str], Lax] = {}
        self.forfeited: set[tuple[str, str, str]] = set()
        """What operators commanded: account, client, incarnation."""
        self.changed = True

    def look(self) -> None:
        """Looks at what has changed since the last time."""
        changed = False
        for service in self.world.services:
            view = self.views.setdefault(service.name, ServiceView())
            if service.slot.raw.total_changes != view.changes:
                view.changes = service.slot.raw.total_changes
                self._look_at_service(service, view)
                changed = True
        decided = self.holder.look()
        if decided is not None:
            changed = True
            for before, state in decided:
                self._follow_exceptions(before, state)
        if changed:
            self.changed = True
            self._bound()
            self.world.runs.bound()

    # A service

    def _look_at_service(self, service: Service, view: ServiceView) -> None:
        admitted = self._rows.look(service, view)
        self._accounts(service, view)
        for row in admitted:
            if row.account is not None and (service.name, row.account) in self.lax:
                self.exempt.add((service.name, row.id))
        for key in [key for key in self.exempt if key[0] == service.name]:
            if key[1] not in view.rows or view.rows[key[1]].state not in PERMIT_STATES:
                self.exempt.discard(key)
        if admitted and self.world.races:
            self._fairness(service, admitted)

    def _accounts(self, service: Service, view: ServiceView) -> None:
        acks: dict[str, tuple[int, int] | None] = {}
        for account, text in service.slot.rows(_ACCOUNTS):
            ack = json.loads(text).get("k")
            acks[account] = None if ack is None else (ack[0], ack[1])
        seq = service.slot.rows(_SEQ)[0][0]
        # By C14 a row forgets what it knew of replies, and may apply one, in the transaction that moves the counter.
        restored, view.seq = seq - view.seq > RESTORED_SEQS, seq
        for account, known in acks.items():
            if restored or account not in view.acks or (known is None and view.acks[account] is not None):
                view.lives[account] += 1
            if known is not None:
                life = f"{service.name} {service.slot_life} {account} row {view.lives[account]}"
                self.invariants.grows("ack", life, known)
        view.acks = acks
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
        view.rows, view.signs = operations(service)
        self._accounts(service, view)
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
        view.rows, view.signs = operations(second)
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
        self.holder.replaced()
        self.look()

    # The holder

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
        if self.holder.phase == "ready":
            for lax in self.lax.values():
                if lax.of_new_epoch:
                    lax.position, lax.of_new_epoch = (self.holder.epoch, 0), False

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
            group_limits = {group: limit for (of, group), limit in self.holder.allowed_groups.items() if of == account}
            self.invariants.bound(pairs, self.holder.allowed.get(account, 0), group_limits)
            state = self.holder.states.get(account)
            if self.holder.is_sure and (state is None or not state.waits_for_epoch):
                counted = {} if state is None else self.holder.footprints(state)
                self.invariants.covers(counted, self._by_client(pairs))

    def _by_client(self, pairs: dict[Pair, int]) -> dict[Pair, int]:
        names = {service.name: service.client_id for service in self.world.services}
        found: dict[Pair, int] = {}
        for (name, group), count in pairs.items():
            pair = (names[name], group)
            found[pair] = found.get(pair, 0) + count
        return found
