"""What goes wrong in a run, each seed by a mix of its own, and what is put right when faults stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from celery_durable import commands
from holder_service.footprint import held
from tests.simulation.checks import Lax
from tests.simulation.databases import client_slot, holder_slot
from tests.simulation.holders import GROUP_ID, HolderProcess
from tests.simulation.processes import Process
from tests.simulation.services import TOPIC_PREFIX, DispatcherProcess, Service, Worker

if TYPE_CHECKING:
    from tests.simulation.shells import World

OPERATOR_LOOKS_MS = 20_000
ACCOUNTS_TOPIC = f"{TOPIC_PREFIX}.accounts"


class Faults:
    """The faults of one run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng
        self._holder_backup: bytes | None = None
        self._client_backups: dict[str, tuple[bytes, int]] = {}
        kinds: dict[str, tuple[int, Callable[[], None]]] = {
            "crash": (8, lambda: self._fuse("crash")),
            "commit in doubt": (4, lambda: self._fuse("unsure")),
            "commit refused": (2, lambda: self._fuse("error")),
            "kill": (3, lambda: self._any_process().kill()),
            "freeze": (3, self._freeze),
            "cancel": (3, self._cancel),
            "limit": (4, self._limit),
            "pause": (1, self._pause),
            "rebalance": (2, self._rebalance),
            "two holders": (1, self._overlap),
            "holder's database lost": (2, self._lose_holder),
            "holder's database goes back": (3, self._holder_goes_back),
            "topic recreated": (1, self._recreate),
            "topic trimmed": (1, self._trim),
            "more partitions": (1, self._more_partitions),
            "Kafka away": (1, self._kafka_away),
            "broker away": (1, self._broker_away),
            "broker wiped": (1, self._wipe_broker),
            "client restored": (1, self._restore_client),
            "client gone": (1, self._client_gone),
            "second database": (1, self._second_database),
            "forfeit of a living client": (1, self._forfeit_living),
            "topic and database lost": (1, self._lose_everything),
        }
        names = sorted(kinds)
        chosen = sorted(self.rng.sample(names, self.rng.randint(2, 9)))
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
        )
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
        before = world.stats["no fault"]
        world.note("fault", name)
        fault()
        if world.stats["no fault"] == before:
            world.stats[f"fault: {name}"] += 1
        self._later()

    def _none(self) -> None:
        """The fault could not be."""
        self.world.stats["no fault"] += 1

    # -- processes

    def _there(self) -> list[Service]:
        return [service for service in self.world.services if not service.gone]

    def _processes(self) -> list[Process]:
        services = [process for service in self._there() for process in service.processes()]
        return [process for process in (*self.world.holders, *services) if process.alive]

    def _any_process(self) -> Process:
        found = self._processes()
        return found[self.rng.randrange(len(found))] if found else self.world.operator

    def _fuse(self, kind: str) -> None:
        web = [service.web for service in self._there()] if kind != "crash" else []
        found = [*self._processes(), *web]
        process = found[self.rng.randrange(len(found))]
        process.fuse, process.fuse_kind = self.rng.randint(1, 25), kind

    def _freeze(self) -> None:
        process = self._any_process()
        if process.frozen:
            return self._none()
        process.freeze()
        world = self.world
        world.note("fault", process.name, "freezes")
        for_ms = self.rng.choice((1_000, 5_000, 9_000, 15_000))
        timeout_ms = self.rng.choice((3_000, 8_000))
        if for_ms > timeout_ms:
            for consumer in process.consumers:
                world.at(timeout_ms, consumer.expire)
        world.at(for_ms, lambda: self._thaw(process))
        return None

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

    # -- what people do

    def _sender(self) -> Service | None:
        """A service whose outbox an operator's command goes through."""
        found = [service for service in self._there() if not service.is_clone]
        return found[0] if found else None

    def _cancel(self) -> None:
        service = self._there()[self.rng.randrange(len(self._there()))]
        view = self.world.checks.views.get(service.name)
        keys = (
            [] if view is None else [row.id for row in view.rows.values() if row.state not in ("succeeded", "failed")]
        )
        if not keys:
            return self._none()
        service.cancel(self.rng.choice(keys))
        return None

    def _limit(self) -> None:
        sender = self._sender()
        if sender is None:
            return self._none()
        account = self.rng.choice(self.world.accounts)
        group = self.rng.choice(self.world.groups) if self.rng.random() < 0.4 else None
        sender.set_limit(account, self.rng.choice((None, 0, 1, 1, 2, 3, 6)), group)
        return None

    def _pause(self) -> None:
        sender = self._sender()
        if sender is None:
            return self._none()
        account = self.rng.choice(self.world.accounts)
        sender.command(commands.pause, account)
        self.world.at(self.rng.randint(100, 15_000), lambda: self._resume(account))
        return None

    def _resume(self, account: str) -> None:
        sender = self._sender()
        if sender is not None and not self.world.settling:
            sender.command(commands.resume, account)

    def _forfeit(self, account: str, client_id: str) -> None:
        state, sender = self.world.checks.states.get(account), self._sender()
        if state is not None and sender is not None:
            sender.command(commands.forfeit, account, client_id, epoch=state.epoch, version=state.version)

    def _forfeit_living(self) -> None:
        found = [(account, name) for account, state in self.world.checks.states.items() for name in state.clients]
        if not found:
            return self._none()
        self._forfeit(*self.rng.choice(found))
        return None

    # -- Kafka and the broker

    def _groups(self) -> list[str]:
        return sorted(self.world.groups_of_kafka.of)

    def _rebalance(self) -> None:
        if not self._groups():
            return self._none()
        group = self.world.groups_of_kafka.of[self.rng.choice(self._groups())]
        group.turn += 1
        self.world.groups_of_kafka.rebalance(group)
        return None

    def _overlap(self) -> None:
        group = self.world.groups_of_kafka.of.get(GROUP_ID)
        if group is None or len(group.members) < 2:
            return self._none()
        group.overlaps = True
        holder = self.world.holders[self.rng.randrange(len(self.world.holders))]
        holder.freeze()
        group.turn += 1
        self.world.groups_of_kafka.rebalance(group)
        self.world.at(self.rng.choice((500, 3_000)), lambda: self._thaw(holder))
        self.world.at(10_000, lambda: setattr(group, "overlaps", False))
        return None

    def _topics(self) -> list[str]:
        return sorted(name for name in self.world.bus.topics if name == ACCOUNTS_TOPIC or ".replies." in name)

    def _recreate(self) -> None:
        self._lose_topic(self.rng.choice(self._topics()))

    def _lose_topic(self, name: str, *, witness: bool | None = None) -> None:
        """The topic is deleted and made again. Kafka may forget what its group committed, or not."""
        world = self.world
        world.note("fault", name, "is made anew")
        world.bus.create(name, self.rng.choice((1, 2)))
        keeps = self.rng.random() < 0.5 if witness is None else witness
        for group in world.groups_of_kafka.of.values():
            if group.topic == name:
                if not keeps:
                    group.committed.clear()
                world.groups_of_kafka.rebalance(group)

    def _trim(self) -> None:
        name = self.rng.choice(self._topics())
        topic = self.world.bus.topics[name]
        for number, log in enumerate(topic.partitions):
            self.world.bus.trim(name, number, self.rng.randint(log.low, log.high))

    def _more_partitions(self) -> None:
        name = self.rng.choice(self._topics())
        self.world.bus.add_partitions(name, len(self.world.bus.topics[name].partitions) + 1)
        for group in self.world.groups_of_kafka.of.values():
            self.world.groups_of_kafka.rebalance(group)

    def _kafka_away(self) -> None:
        bus = self.world.bus
        if bus.is_down:
            return self._none()
        bus.is_down = True
        self.world.at(self.rng.choice((1_000, 6_000, 20_000)), self._kafka_back)
        return None

    def _kafka_back(self) -> None:
        bus = self.world.bus
        bus.is_down = False
        for name, topic in bus.topics.items():
            for number in range(len(topic.partitions)):
                bus.announce(name, number)
        for group in self.world.groups_of_kafka.of.values():
            self.world.groups_of_kafka.rebalance(group)

    def _broker_away(self) -> None:
        self.world.broker_is_down = True
        self.world.at(self.rng.choice((1_000, 6_000)), lambda: setattr(self.world, "broker_is_down", False))

    def _wipe_broker(self) -> None:
        for service in self.world.services:
            service.wipe_broker()

    # -- databases

    def _back_up(self) -> None:
        self._holder_backup = holder_slot().backup()
        for service in self._there():
            self._client_backups[service.name] = (service.slot.backup(), service.slot_life)

    def _lose_holder(self) -> None:
        if not self.world.topic_is_whole() or self.world.bus.is_down:
            return self._none()
        self._replace_holder(None)
        return None

    def _holder_goes_back(self) -> None:
        """An older copy, where Kafka can tell: the group has committed what the copy has not."""
        world = self.world
        if self._holder_backup is None or not world.topic_is_whole() or world.bus.is_down:
            return self._none()
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
            return self._none()
        world.checks.trusted_epoch = life[0][0] + 1
        self._replace_holder(self._holder_backup)
        return None

    def _replace_holder(self, content: bytes | None) -> None:
        world = self.world
        for holder in list(world.holders):
            holder.kill()
        holder_slot().load(content)
        world.checks.holder_replaced()
        world.note("fault", "the holder's database is", "new" if content is None else "an older copy")

    def _lose_everything(self) -> None:
        world = self.world
        group = world.groups_of_kafka.of.get(GROUP_ID)
        if world.bus.is_down or group is None or not group.committed:
            return self._none()
        self._replace_holder(None)
        self._lose_topic(ACCOUNTS_TOPIC, witness=True)
        if self.rng.random() < 0.5:
            world.bus.create(f"{TOPIC_PREFIX}.limits", 1)
        return None

    def _restore_client(self) -> None:
        """The service's database is an older copy of itself."""
        found = [service for service in self._there() if service.name in self._client_backups and not service.is_clone]
        if not found:
            return self._none()
        service = found[self.rng.randrange(len(found))]
        content, life = self._client_backups[service.name]
        if life != service.slot_life:
            return self._none()
        for process in service.processes():
            process.kill()
        self.world.checks.restore_service(service, content)
        return None

    def _client_gone(self) -> None:
        found = [service for service in self._there() if not service.is_clone]
        if len(found) < 2:
            return self._none()
        service = found[self.rng.randrange(len(found))]
        self._end_for_ever(service)
        return None

    def _end_for_ever(self, service: Service) -> None:
        self.world.note("fault", service.name, "is gone for ever")
        service.gone = True
        for process in service.processes():
            process.kill()
        service.wipe_broker()

    def _second_database(self) -> None:
        """Another database, with work of its own, under a client ID that is taken."""
        world = self.world
        found = [service for service in self._there() if not service.is_clone]
        if any(service.is_clone for service in world.services) or not found:
            return self._none()
        first = found[self.rng.randrange(len(found))]
        client_slot(3).load()
        second = world.add_service(f"{first.name}2", first.client_id, 3)
        second.is_clone = True
        world.launch(second)
        for _ in range(2):
            world.enqueue(second, self.rng.choice(world.accounts), self.rng.choice(world.groups))
        return None

    # -- the end of it

    def stop(self) -> None:
        """Faults stop: all is put right that people would put right."""
        from tests.simulation.shells import Weather

        world = self.world
        world.note("fault", "all faults stop")
        world.weather = world.bus.weather = Weather()
        world.broker_is_down = False
        self._kafka_back()
        for service in self._there():
            if service.is_clone:
                self._end_for_ever(service)
        for process in self._processes():
            process.fuse = None
            self._thaw(process)
        for service in world.services:
            service.web.fuse = None
        for group in world.groups_of_kafka.of.values():
            group.overlaps = False
        sender = self._sender()
        if sender is not None:
            for account in world.accounts:
                sender.command(commands.resume, account)
                sender.set_limit(account, self.rng.randint(1, 3))
                for group_name in world.groups:
                    sender.set_limit(account, None, group_name)
        self.operate()

    def operate(self) -> None:
        """What an operator does who looks now and then: permits of those who are gone, and the word to go on."""
        world, checks = self.world, self.world.checks
        if checks.phase == "topic_lost":
            for service in world.services:
                for account in world.accounts:
                    checks.except_service(service, account, Lax(of_new_epoch=True))
            world.operator.go()
        incarnations = {service.client_id: service.incarnation() for service in self._there() if not service.is_clone}
        for account, state in list(checks.states.items()):
            for name, client in state.clients.items():
                holds = client.unknown or any(held(pair) for pair in client.pairs.values())
                if client.incarnation != incarnations.get(name) and holds and not client.forfeited:
                    self._forfeit(account, name)
        world.at(OPERATOR_LOOKS_MS, self.operate)
