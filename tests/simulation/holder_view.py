"""The holder's database as it was seen last, and what must hold of what it has decided since."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_durable.permits.messages import MAX_INT
from holder_service.account import AccountState
from holder_service.footprint import footprint
from holder_service.semaphore import group_limits_in_force, limit_in_force
from tests.invariants import Pair
from tests.simulation.databases import holder_slot

if TYPE_CHECKING:
    from tests.simulation.shells import World

SERVED_MAX = 3
"""How often every other pair of an account may be served, on the average, while one wants something and has nothing."""

_OFFSETS = "SELECT topic, topic_id, partition, next_offset FROM holder_offsets"


class HolderView:
    """Looks at the accounts of the holder."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.invariants = world.invariants
        self.states: dict[str, AccountState] = {}
        self.phase: str | None = None
        self.epoch = 0
        self.trusted_epoch = 0
        """From this epoch on the holder's database counts as true; below, it is an old copy, not noticed yet."""
        self.allowed: dict[str, int] = {}
        self.allowed_groups: dict[tuple[str, str], int] = {}
        self._life = 0
        self._changes = -1
        self._versions: dict[str, tuple[int, int]] = {}

    def replaced(self) -> None:
        """The holder's database is new, or an older copy of itself."""
        self._life += 1
        self._changes = -1

    def look(self) -> list[tuple[AccountState | None, AccountState]] | None:
        """Looks at what was committed. Returns the accounts that were decided, before and after; None: nothing was."""
        slot = holder_slot()
        if slot.raw.total_changes == self._changes:
            return None
        self._changes = slot.raw.total_changes
        life = slot.rows("SELECT epoch, phase FROM holder_database")
        self.epoch, self.phase = life[0] if life else (0, None)
        if life:
            self.invariants.grows("epoch", f"holder database {self._life}", (self.epoch,))
        decided = []
        before, self.states = self.states, {}
        for account, version, text in slot.rows("SELECT account, version, state FROM holder_accounts"):
            known = before.get(account)
            if known is not None and self._versions.get(account) == (self._life, version):
                self.states[account] = known
                continue
            life_before, _ = self._versions.get(account, (None, 0))
            self._versions[account] = (self._life, version)
            state = self.states[account] = AccountState.from_json(text)
            self.invariants.grows("version", f"{account} of holder database {self._life}", (version,))
            self._note_state(state)
            decided.append((known, state))
            if known is not None and known.epoch == state.epoch and life_before == self._life:
                self._follow_service(known, state)
                self._follow_lowered(known, state)
        self._follow_limits()
        for topic, topic_id, partition, offset in slot.rows(_OFFSETS):
            if self.world.bus.topics[topic].topic_id != topic_id:
                continue  # made anew a moment ago: its reader learns so within 10 s
            self.invariants.grows("offset", f"{topic_id} {partition} of holder database {self._life}", (offset,))
        return decided

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
