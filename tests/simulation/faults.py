"""What goes wrong in a run, each seed by a mix of its own, and what is put right when faults stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation import crashes
from tests.simulation.databases import client_slot, holder_slot
from tests.simulation.holders import GROUP_ID, HolderProcess
from tests.simulation.people import People
from tests.simulation.processes import Process
from tests.simulation.services import TOPIC_PREFIX, DispatcherProcess, Service
from tests.simulation.workers import Worker

if TYPE_CHECKING:
    from tests.simulation.shells import World

ACCOUNTS_TOPIC = f"{TOPIC_PREFIX}.accounts"
LIMITS_TOPIC = f"{TOPIC_PREFIX}.limits"


class Faults:
    """The faults of one run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng
        self._holder_backup: bytes | None = None
        self._client_backups: dict[str, tuple[bytes, int]] = {}
        people = self.people = People(world)
        kinds: dict[str, tuple[int, Callable[[], bool]]] = {
            "crash": (8, lambda: self._fuse("crash")),
            "commit in doubt": (4, lambda: self._fuse("unsure")),
            "commit refused": (2, lambda: self._fuse("error")),
            "crash at a point": (6, self.doom),
            "kill": (3, self._kill),
            "freeze": (5, self._freeze),
            "cancel": (3, people.cancel),
            "forget": (2, people.forget),
            "limit": (4, people.limit),
            "pause": (1, people.pause),
            "rebalance": (2, self._rebalance),
            "two owners": (4, self._overlap),
            "holder's database lost": (2, self._lose_holder),
            "holder's database goes back": (3, self._holder_goes_back),
            "topic recreated": (1, self._recreate),
            "topic trimmed": (1, self._trim),
            "limits topic recreated": (1, self._recreate_limits),
            "limits topic trimmed": (3, self._trim_limits),
            "more partitions": (1, self._more_partitions),
            "Kafka away": (1, self._kafka_away),
            "broker away": (1, self._broker_away),
            "broker wiped": (1, self._wipe_broker),
            "client restored": (1, self._restore_client),
            "client gone": (1, self._client_gone),
            "database copied": (1, self._copy_database),
            "second database": (1, self._second_database),
            "forfeit of a living client": (1, people.forfeit_living),
            "topic and database lost": (1, self._lose_everything),
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
            self._back_up()
        name, fault = self.rng.choices(self._kinds, self._weights)[0]
        world.note("fault", name)
        world.stats[f"fault: {name}" if fault() else f"not possible: {name}"] += 1
        self._later()

    # -- processes

    def _processes(self) -> list[Process]:
        services = [process for service in self.people.there() for process in service.processes()]
        return [process for process in (*self.world.holders, *services) if process.alive]

    def _any_process(self) -> Process:
        found = self._processes()
        return found[self.rng.randrange(len(found))] if found else self.world.operator

    def _fuse(self, kind: str) -> bool:
        web = [service.web for service in self.people.there()] if kind != "crash" else []
        found = [*self._processes(), *web]
        if not found:
            return False
        process = found[self.rng.randrange(len(found))]
        process.fuse_at_commits = kind != "crash" or self.rng.random() < 0.5
        process.fuse, process.fuse_kind = self.rng.randint(1, 6), kind
        return True

    def doom_first(self) -> None:
        """Before any process starts: some crash points are passed only then."""
        self.world.doomed.update(one for one in crashes.RARE if self.rng.random() < crashes.CHANCES.get(one, 0.3))
        self.world.doomed.update(self.rng.choices(crashes.USUAL, k=2))

    def doom(self) -> bool:
        """The next process that passes a drawn crash point dies there."""
        self.world.doomed.add(self.rng.choice(crashes.USUAL))
        return True

    def _kill(self) -> bool:
        self._any_process().kill()
        return True

    def _freeze(self) -> bool:
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
        world.at(for_ms, lambda: self._thaw(process))
        return True

    def _thaw(self, process: Process) -> None:
        if process.frozen:
            self.world.note("fault", process.name, "goes on")
            process.thaw()
            if isinstance(process, Worker):
                process.service.redeliver()

    def restart_later(self, process: Process) -> None:
        """Whoever runs a process starts another in its place."""
        delay_ms = self.rng.choice((10, 500, 4_000))
        if isinstance(process, Worker):
            for body in process.bodies:
                if self.rng.random() < 0.5:
                    attempt = body.attempt
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

    # -- Kafka and the broker

    def _groups(self) -> list[str]:
        return sorted(self.world.groups_of_kafka.of)

    def _rebalance(self) -> bool:
        if not self._groups():
            return False
        group = self.world.groups_of_kafka.of[self.rng.choice(self._groups())]
        group.turn += 1
        self.world.groups_of_kafka.rebalance(group)
        return True

    def _overlap(self) -> bool:
        """Partitions go to their next owner while the last one still reads them, and does not hear of it."""
        world = self.world
        groups = [group for _, group in sorted(world.groups_of_kafka.of.items()) if len(group.members) > 1]
        if not groups:
            return False
        group = groups[self.rng.randrange(len(groups))]
        group.overlaps = True
        until_ms = self.rng.choice((1_000, 5_000, 10_000))
        for member in group.members:
            if member.assigned:
                member.deaf_until_ms = world.clock.now_ms + until_ms
        group.turn += 1
        world.groups_of_kafka.rebalance(group)
        world.at(until_ms, lambda: setattr(group, "overlaps", False))
        return True

    def _topics(self) -> list[str]:
        return sorted(name for name in self.world.bus.topics if name == ACCOUNTS_TOPIC or ".replies." in name)

    def _recreate(self) -> bool:
        self._lose_topic(self.rng.choice(self._topics()))
        return True

    def _lose_topic(self, name: str, *, witness: bool | None = None) -> None:
        """The topic is deleted and made again. Kafka may forget what its group committed, or not."""
        world = self.world
        world.note("fault", name, "is made anew")
        groups = [group for group in world.groups_of_kafka.of.values() if group.topic == name]
        # Without it nobody could tell that the holder's database was lost, or went back, a moment ago.
        keeps = (not world.checks.holder.is_sure or self.rng.random() < 0.5) if witness is None else witness
        read = [number for group in groups for number in group.committed] if keeps else []
        # Nobody asks for what was committed of partitions that are no more; Kafka forgets it.
        world.bus.create(name, max([self.rng.choice((1, 2)), *(number + 1 for number in read)]))
        for group in groups:
            if not keeps:
                group.committed.clear()
            world.groups_of_kafka.rebalance(group)

    def _trim(self) -> bool:
        name = self.rng.choice(self._topics())
        if name == ACCOUNTS_TOPIC and not self.world.checks.holder.is_sure:
            return False  # the holder's database was lost, and is made again from this
        topic = self.world.bus.topics[name]
        for number, log in enumerate(topic.partitions):
            self.world.bus.trim(name, number, self.rng.randint(log.low, log.high))
        return True

    def _recreate_limits(self) -> bool:
        """The limits topic is lost by itself. What is in force stays so; only a lost database would miss it."""
        self._lose_topic(LIMITS_TOPIC)
        return True

    def _trim_limits(self) -> bool:
        logs = enumerate(self.world.bus.topics[LIMITS_TOPIC].partitions)
        filled = [(number, log) for number, log in logs if log.messages]
        for number, log in filled:
            self.world.bus.trim(LIMITS_TOPIC, number, self.rng.randint(log.low + 1, log.high))
        return bool(filled)

    def _more_partitions(self) -> bool:
        name = self.rng.choice(self._topics())
        self.world.bus.add_partitions(name, len(self.world.bus.topics[name].partitions) + 1)
        for group in self.world.groups_of_kafka.of.values():
            self.world.groups_of_kafka.rebalance(group)
        return True

    def _kafka_away(self) -> bool:
        bus = self.world.bus
        if bus.is_down:
            return False
        bus.is_down = True
        self.world.at(self.rng.choice((1_000, 6_000, 20_000)), self.world.kafka_back)
        return True

    def _broker_away(self) -> bool:
        self.world.broker_is_down = True
        self.world.at(self.rng.choice((1_000, 6_000)), lambda: setattr(self.world, "broker_is_down", False))
        return True

    def _wipe_broker(self) -> bool:
        for service in self.world.services:
            service.wipe_broker()
        return True

    # -- databases

    def _back_up(self) -> None:
        self._holder_backup = holder_slot().backup()
        for service in self.people.there():
            self._client_backups[service.name] = (service.slot.backup(), service.slot_life)

    def _lose_holder(self) -> bool:
        if not self.world.topic_is_whole() or self.world.bus.is_down:
            return False
        self._replace_holder(None)
        return True

    def _holder_goes_back(self) -> bool:
        """An older copy, where Kafka can tell: the group has committed what the copy has not."""
        world = self.world
        if self._holder_backup is None or not world.topic_is_whole() or world.bus.is_down:
            return False
        slot = holder_slot()
        present = slot.backup()
        slot.load(self._holder_backup)
        stored = {
            number: offset
            for number, topic_id, offset in slot.rows("SELECT partition, topic_id, next_offset FROM holder_offsets")
            if topic_id == world.bus.topics[ACCOUNTS_TOPIC].topic_id
        }
        life = slot.rows("SELECT epoch FROM holder_database")
        slot.load(present)
        group = world.groups_of_kafka.of.get(GROUP_ID)
        committed = {} if group is None else group.committed
        topic_id = world.bus.topics[ACCOUNTS_TOPIC].topic_id
        noticed = any(
            metadata == topic_id and number in stored and stored[number] < offset
            for number, (offset, metadata) in committed.items()
        )
        if not noticed or not life:
            return False
        world.checks.holder.trusted_epoch = life[0][0] + 1
        self._replace_holder(self._holder_backup)
        return True

    def _replace_holder(self, content: bytes | None) -> None:
        world = self.world
        for holder in list(world.holders):
            holder.kill()
        holder_slot().load(content)
        world.checks.holder_replaced()
        world.note("fault", "the holder's database is", "new" if content is None else "an older copy")

    def _lose_everything(self) -> bool:
        world = self.world
        group = world.groups_of_kafka.of.get(GROUP_ID)
        if world.bus.is_down or group is None or not group.committed:
            return False
        self._replace_holder(None)
        self._lose_topic(ACCOUNTS_TOPIC, witness=True)
        if self.rng.random() < 0.5:
            self._lose_topic(LIMITS_TOPIC)
        return True

    def _restore_client(self) -> bool:
        """The service's database is an older copy of itself."""
        found = [
            service for service in self.people.there() if service.name in self._client_backups and not service.is_clone
        ]
        if not found:
            return False
        service = found[self.rng.randrange(len(found))]
        content, life = self._client_backups[service.name]
        if life != service.slot_life:
            return False
        for process in service.processes():
            process.kill()
        self.world.checks.restore_service(service, content)
        return True

    def _client_gone(self) -> bool:
        found = [service for service in self.people.there() if not service.is_clone]
        if len(found) < 2:
            return False
        service = found[self.rng.randrange(len(found))]
        self._end_for_ever(service)
        return True

    def _end_for_ever(self, service: Service) -> None:
        self.world.note("fault", service.name, "is gone for ever")
        service.gone = True
        for process in service.processes():
            process.kill()
        service.wipe_broker()

    def _second_database(self) -> bool:
        """Another database, with work of its own, under a client ID that is taken."""
        world = self.world
        first = self._to_clone()
        if first is None:
            return False
        client_slot(3).load()
        second = self._clone(first)
        world.launch(second)
        for _ in range(2):
            world.enqueue(second, self.rng.choice(world.accounts), self.rng.choice(world.groups))
        return True

    def _copy_database(self) -> bool:
        """A service's database is copied byte for byte, and both are used: two services with one identity."""
        first = self._to_clone()
        if first is None:
            return False
        client_slot(3).load(first.slot.backup())
        second = self._clone(first)
        second.copied_from = first
        self.world.checks.copied(first, second)
        self.world.launch(second)
        return True

    def _to_clone(self) -> Service | None:
        """Whose client ID another database is to have: one at a time."""
        found = [service for service in self.people.there() if not service.is_clone]
        if any(service.is_clone for service in self.world.services) or not found:
            return None
        return found[self.rng.randrange(len(found))]

    def _clone(self, first: Service) -> Service:
        second = self.world.add_service(f"{first.name}2", first.client_id, 3)
        second.is_clone = True
        return second

    # -- the end of it

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
                self._end_for_ever(service)
                if service.copied_from is not None and not service.copied_from.gone:
                    world.checks.copy_ended(service.copied_from, service)
        for process in self._processes():
            process.fuse = None
            self._thaw(process)
        for service in world.services:
            service.web.fuse, service.web.alive = None, True
        for group in world.groups_of_kafka.of.values():
            group.overlaps = False
            for member in group.members:
                member.deaf_until_ms = 0
        self.people.settle()
