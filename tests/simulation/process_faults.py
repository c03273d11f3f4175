"""What goes wrong with processes: they die, at crash points too, and freeze. Others are started in their place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation import crashes
from tests.simulation.holders import HolderProcess
from tests.simulation.people import People
from tests.simulation.processes import Process
from tests.simulation.services import DispatcherProcess
from tests.simulation.workers import Worker

if TYPE_CHECKING:
    from tests.simulation.shells import World


class ProcessFaults:
    """Faults of processes. What returns a truth says whether there was something to do."""

    def __init__(self, world: World, people: People) -> None:
        self.world = world
        self.rng = world.rng
        self.people = people

    def processes(self) -> list[Process]:
        """All that live."""
        services = [process for service in self.people.there() for process in service.processes()]
        return [process for process in (*self.world.holders, *services) if process.alive]

    def _any_process(self) -> Process:
        found = self.processes()
        return found[self.rng.randrange(len(found))] if found else self.world.operator

    def fuse(self, kind: str) -> bool:
        """Something happens soon at a crash point that some process passes."""
        web = [service.web for service in self.people.there()] if kind != "crash" else []
        found = [*self.processes(), *web]
        if not found:
            return False
        process = found[self.rng.randrange(len(found))]
        process.fuse_at_commits = kind != "crash" or self.rng.random() < 0.5
        process.fuse, process.fuse_kind = self.rng.randint(1, 6), kind
        return True

    def doom_first(self) -> None:
        """Before any process starts: some crash points are passed only then."""
        self.world.doomed.update(one for one in crashes.RARE if self.rng.random() < crashes.CHANCES[one])
        self.world.doomed.update(self.rng.choices(crashes.USUAL, k=4))

    def doom(self) -> bool:
        """The next process that passes a drawn crash point dies there."""
        self.world.doomed.add(self.rng.choice(crashes.USUAL))
        return True

    def kill(self) -> bool:
        """A process is killed."""
        self._any_process().kill()
        return True

    def freeze(self) -> bool:
        """A process stands still for a while; a busy worker more often than others."""
        busy = [
            worker for service in self.people.there() for worker in service.workers if worker.bodies and worker.alive
        ]
        process = busy[0] if busy and self.rng.random() < 0.5 else self._any_process()
        if process.frozen:
            return False
        process.freeze()
        world = self.world
        world.note("fault", process.name, "freezes")
        for_ms = self.rng.choice((1_000, 5_000, 9_000, 15_000))
        timeout_ms = self.rng.choice((3_000, 8_000))
        if for_ms > timeout_ms:
            for consumer in process.consumers:
                world.at(timeout_ms, consumer.expire)
        world.at(for_ms, lambda: self.thaw(process))
        return True

    def thaw(self, process: Process) -> None:
        """It goes on."""
        if process.frozen:
            self.world.note("fault", process.name, "goes on")
            process.thaw()
            if isinstance(process, Worker):
                process.service.redeliver()

    def restart_later(self, process: Process) -> None:
        """Whoever runs a process starts another in its place."""
        delay_ms = self.rng.choice((10, 500, 4_000))
        if isinstance(process, Worker):
            again = [body.attempt for body in process.bodies if self.rng.random() < 0.5]
            for attempt in (*again, *process.unacknowledged):
                process.service.redeliver_later(attempt.id, attempt.generation, attempt.attempt)
        self.world.at(delay_ms, lambda: self._restart(process))

    def _restart(self, process: Process) -> None:
        world = self.world
        if isinstance(process, HolderProcess):
            if process in world.holders:
                world.holders[world.holders.index(process)] = HolderProcess(world, process.number)
        elif isinstance(process, DispatcherProcess):
            service = process.service
            if not service.gone and process in service.dispatchers:
                service.dispatchers[service.dispatchers.index(process)] = DispatcherProcess(service, process.number)
        elif isinstance(process, Worker):
            service = process.service
            if not service.gone and process in service.workers:
                service.workers[service.workers.index(process)] = Worker(service, process.number)
                service.redeliver()
        else:
            process.alive = True
