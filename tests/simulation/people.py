"""What people do in a run: limits, pauses, cancels, and what an operator does who looks now and then."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from celery_durable import commands
from celery_durable.store.schema import ENDED_STATES, PERMIT_STATES, RUNNING, WAITING_STATES
from holder_service.footprint import held
from tests.simulation.checks import Lax
from tests.simulation.services import Service

if TYPE_CHECKING:
    from tests.simulation.shells import World

OPERATOR_LOOKS_MS = 20_000


class People:
    """Callers and operators. What returns a truth says whether there was something to do."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng

    def there(self) -> list[Service]:
        """The services that are not gone for ever."""
        return [service for service in self.world.services if not service.gone]

    def sender(self) -> Service | None:
        """A service whose outbox an operator's command goes through."""
        found = [service for service in self.there() if not service.is_clone]
        return found[0] if found else None

    def cancel(self) -> bool:
        """A caller cancels an operation, which may run or have ended."""
        of = self.rng.choices((ENDED_STATES, (RUNNING,), (*WAITING_STATES, *PERMIT_STATES)), (2, 5, 3))[0]
        return self._of_one(Service.cancel, of)

    def forget(self) -> bool:
        """A caller forgets the result of an operation, which may not have ended yet."""
        of = ENDED_STATES if self.rng.random() < 0.8 else (*WAITING_STATES, *PERMIT_STATES)
        return self._of_one(Service.forget, of)

    def purge(self) -> bool:
        """A caller deletes what has ended."""
        self._service().purge()
        return True

    def _service(self) -> Service:
        return self.there()[self.rng.randrange(len(self.there()))]

    def _of_one(self, act: Callable[[Service, str], None], states: Collection[str]) -> bool:
        service = self._service()
        view = self.world.checks.views.get(service.name)
        rows = [] if view is None else list(view.rows.values())
        keys = [row.id for row in rows if row.state in states]
        if not keys:
            return False
        act(service, self.rng.choice(keys))
        return True

    def limit(self) -> bool:
        """Another limit, of an account or a group; none, 0 and what is below what runs too."""
        sender = self.sender()
        if sender is None:
            return False
        account = self.rng.choice(self.world.accounts)
        group = self.rng.choice(self.world.groups) if self.rng.random() < 0.4 else None
        sender.set_limit(account, self.rng.choice((None, 0, 1, 1, 2, 3, 6)), group)
        return True

    def pause(self) -> bool:
        """An account is paused for a while."""
        sender = self.sender()
        if sender is None:
            return False
        account = self.rng.choice(self.world.accounts)
        sender.command(commands.pause, account)
        self.world.at(self.rng.randint(100, 15_000), lambda: self._resume(account))
        return True

    def _resume(self, account: str) -> None:
        sender = self.sender()
        if sender is not None and not self.world.settling:
            sender.command(commands.resume, account)

    def forfeit(self, account: str, client_id: str) -> None:
        """An operator frees what a client holds, as the holder's command line shows it."""
        state, sender = self.world.checks.holder.states.get(account), self.sender()
        if state is not None and sender is not None:
            self.world.checks.forfeited.add((account, client_id, state.clients[client_id].incarnation))
            sender.command(commands.forfeit, account, client_id, epoch=state.epoch, version=state.version)

    def forfeit_living(self) -> bool:
        """An operator takes a service for dead that is not."""
        found = [
            (account, name) for account, state in self.world.checks.holder.states.items() for name in state.clients
        ]
        if not found:
            return False
        self.forfeit(*self.rng.choice(found))
        return True

    def operate(self) -> None:
        """What an operator does who looks now and then: permits of those who are gone, and the word to go on."""
        world, checks = self.world, self.world.checks
        if checks.holder.phase == "topic_lost":
            for service in world.services:
                for account in world.accounts:
                    checks.except_service(service, account, Lax(of_new_epoch=True))
            world.operator.go()
        incarnations = {service.client_id: service.incarnation() for service in self.there() if not service.is_clone}
        for account, state in list(checks.holder.states.items()):
            for name, client in state.clients.items():
                holds = client.unknown or any(held(pair) for pair in client.pairs.values())
                if client.incarnation != incarnations.get(name) and holds and not client.forfeited:
                    self.forfeit(account, name)
        for account, state in list(checks.holder.states.items()):
            if state.waits_for_epoch and checks.holder.phase == "ready" and world.draw_impatience():
                for service in world.services:
                    client = state.clients.get(service.client_id)
                    if client is not None and client.unknown:
                        checks.except_service(service, account, Lax((state.epoch, 0)))
                world.operator.go(account)
        world.at(OPERATOR_LOOKS_MS, self.operate)

    def settle(self) -> None:
        """Faults have stopped: limits that let everything through, no pause, and an operator who looks."""
        world, sender = self.world, self.sender()
        limits = (1, 3) if world.profile is None else world.profile.settles_at
        if sender is not None:
            for account in world.accounts:
                sender.command(commands.resume, account)
                sender.set_limit(account, self.rng.randint(*limits))
                for group in world.groups:
                    sender.set_limit(account, None, group)
        self.operate()
