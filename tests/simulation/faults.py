"""What goes wrong in a run, each seed by a mix of its own, and what is put right when faults stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation import crashes
from tests.simulation.database_faults import DatabaseFaults
from tests.simulation.kafka_faults import KafkaFaults
from tests.simulation.people import People
from tests.simulation.process_faults import ProcessFaults

if TYPE_CHECKING:
    from tests.simulation.processes import Process
    from tests.simulation.shells import World


class Faults:
    """The faults of one run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng
        people = self.people = People(world)
        processes = self._processes = ProcessFaults(world, people)
        kafka = self._kafka = KafkaFaults(world)
        databases = self._databases = DatabaseFaults(world, people, kafka)
        kinds: dict[str, tuple[int, Callable[[], bool]]] = {
            "crash": (8, lambda: processes.fuse("crash")),
            "commit in doubt": (4, lambda: processes.fuse("unsure")),
            "commit refused": (2, lambda: processes.fuse("error")),
            "crash at a point": (6, processes.doom),
            "kill": (3, processes.kill),
            "freeze": (5, processes.freeze),
            "cancel": (3, people.cancel),
            "forget": (4, people.forget),
            "purge": (1, people.purge),
            "limit": (4, people.limit),
            "pause": (1, people.pause),
            "rebalance": (2, kafka.rebalance),
            "two owners": (4, kafka.overlap),
            "holder's database lost": (2, databases.lose_holder),
            "holder's database goes back": (3, databases.holder_goes_back),
            "topic recreated": (1, kafka.recreate),
            "topic trimmed": (1, kafka.trim),
            "limits topic recreated": (1, kafka.recreate_limits),
            "limits topic trimmed": (3, kafka.trim_limits),
            "more partitions": (1, kafka.more_partitions),
            "Kafka away": (1, kafka.go_away),
            "broker away": (1, kafka.broker_away),
            "broker wiped": (1, kafka.wipe_broker),
            "client restored": (1, databases.restore_client),
            "client gone": (1, databases.client_gone),
            "database copied": (1, databases.copy_database),
            "second database": (1, databases.second_database),
            "forfeit of a living client": (1, people.forfeit_living),
            "topic and database lost": (1, databases.lose_everything),
        }
        names = sorted(kinds)
        chosen = sorted(self.rng.sample(names, self.rng.randint(2, 9)))
        if world.profile is not None:
            chosen = sorted(world.profile.faults)
        self._kinds = [(name, kinds[name][1]) for name in chosen]
        self._weights = [kinds[name][0] for name in chosen]

    def start(self) -> None:
        """Begins."""
        from tests.simulation.shells import Weather

        rng = self.rng
        self.world.weather = self.world.bus.weather = Weather(
            loss=rng.choice((0.0, 0.0, 0.1, 0.25)),
            double=rng.choice((0.0, 0.1, 0.3)),
            slow=rng.choice((0.0, 0.1, 0.4)),
            slow_ms=rng.choice((500, 5_000, 20_000)),
            error=rng.choice((0.0, 0.0, 0.1)),
            commit_loss=rng.choice((0.0, 0.0, 0.2)),
            broker_loss=rng.choice((0.0, 0.1)),
            broker_double=rng.choice((0.0, 0.2)),
            broker_slow=rng.choice((0.0, 0.1)),
            broker_error=rng.choice((0.0, 0.0, 0.2)),
        )
        if self.world.profile is not None and self.world.profile.weather is not None:
            self.world.weather = self.world.bus.weather = Weather(**self.world.profile.weather)
        self.world.note("fault", "mix:", *(name for name, _ in self._kinds))
        self._later()

    def _later(self) -> None:
        self.world.at(self.rng.choice((50, 300, 1_000, 3_000)), self._strike)

    def _strike(self) -> None:
        world = self.world
        if world.settling or world.clock.now_ms >= world.faults_end_ms:
            return
        if self.rng.random() < 0.25:
            self._databases.back_up()
        name, fault = self.rng.choices(self._kinds, self._weights)[0]
        world.note("fault", name)
        world.stats[f"fault: {name}" if fault() else f"not possible: {name}"] += 1
        self._later()

    def doom_first(self) -> None:
        """Before any process starts: some crash points are passed only then."""
        self._processes.doom_first()

    def restart_later(self, process: Process) -> None:
        """Whoever runs a process starts another in its place."""
        self._processes.restart_later(process)

    def stop(self) -> None:
        """Faults stop: all is put right that people would put right."""
        from tests.simulation.shells import Weather

        world = self.world
        world.note("fault", "all faults stop")
        world.weather = world.bus.weather = Weather()
        world.broker_is_down = False
        world.doomed.intersection_update(crashes.RARE)  # some are passed only when an operator looks
        world.kafka_back()
        for service in self.people.there():
            if service.is_clone:
                self._databases.end_for_ever(service)
                if service.copied_from is not None and not service.copied_from.gone:
                    world.checks.copy_ended(service.copied_from, service)
        for process in self._processes.processes():
            process.fuse = None
            self._processes.thaw(process)
        for service in world.services:
            service.web.fuse, service.web.alive = None, True
        for group in world.groups_of_kafka.of.values():
            group.overlaps = False
            for member in group.members:
                member.deaf_until_ms = 0
        self.people.settle()
