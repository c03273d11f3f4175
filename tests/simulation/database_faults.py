"""What goes wrong with databases: lost, restored from a backup, copied, or under a name that is taken."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.databases import client_slot, holder_slot
from tests.simulation.holders import GROUP_ID
from tests.simulation.kafka_faults import ACCOUNTS_TOPIC, LIMITS_TOPIC, KafkaFaults
from tests.simulation.people import People
from tests.simulation.services import Service

if TYPE_CHECKING:
    from tests.simulation.shells import World


class DatabaseFaults:
    """Faults of databases. What returns a truth says whether there was something to do."""

    def __init__(self, world: World, people: People, kafka: KafkaFaults) -> None:
        self.world = world
        self.rng = world.rng
        self.people = people
        self._kafka = kafka
        self._holder_backup: bytes | None = None
        self._client_backups: dict[str, tuple[bytes, int]] = {}

    def back_up(self) -> None:
        """Backups are made."""
        self._holder_backup = holder_slot().backup()
        for service in self.people.there():
            self._client_backups[service.name] = (service.slot.backup(), service.slot_life)

    def lose_holder(self) -> bool:
        """The holder's database is new and empty."""
        if not self.world.topic_is_whole() or self.world.bus.is_down:
            return False
        self._replace_holder(None)
        return True

    def holder_goes_back(self) -> bool:
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

    def lose_everything(self) -> bool:
        """The holder's database is lost together with the topic, and the limits topic too or not."""
        world = self.world
        group = world.groups_of_kafka.of.get(GROUP_ID)
        if world.bus.is_down or group is None or not group.committed:
            return False
        self._replace_holder(None)
        self._kafka.lose_topic(ACCOUNTS_TOPIC, witness=True)
        if self.rng.random() < 0.5:
            self._kafka.lose_topic(LIMITS_TOPIC)
        return True

    def restore_client(self) -> bool:
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

    def client_gone(self) -> bool:
        """A service ends and never comes back."""
        found = [service for service in self.people.there() if not service.is_clone]
        if len(found) < 2:
            return False
        service = found[self.rng.randrange(len(found))]
        self.end_for_ever(service)
        return True

    def end_for_ever(self, service: Service) -> None:
        """It ends and never comes back."""
        self.world.note("fault", service.name, "is gone for ever")
        service.gone = True
        for process in service.processes():
            process.kill()
        service.wipe_broker()

    def second_database(self) -> bool:
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

    def copy_database(self) -> bool:
        """A service's database is copied byte for byte, and both are used: two services with one identity."""
        first = self._to_clone()
        if first is None:
            return False
        client_slot(3).load(first.slot.backup())
        # Else what waits in the copy might be due a month later.
        client_slot(3).skew_ms = first.slot.skew_ms
        second = self._clone(first)
        second.copied_from = first
        second.told = dict(first.told)
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
