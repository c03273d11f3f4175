"""What goes wrong with Kafka as a whole, its topics and its groups, and with Celery's broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.services import TOPIC_PREFIX

if TYPE_CHECKING:
    from tests.simulation.shells import World

ACCOUNTS_TOPIC = f"{TOPIC_PREFIX}.accounts"
LIMITS_TOPIC = f"{TOPIC_PREFIX}.limits"


class KafkaFaults:
    """Faults of Kafka and of the broker. What returns a truth says whether there was something to do."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng

    def _groups(self) -> list[str]:
        return sorted(self.world.groups_of_kafka.of)

    def rebalance(self) -> bool:
        """Each partition goes to another member."""
        if not self._groups():
            return False
        group = self.world.groups_of_kafka.of[self.rng.choice(self._groups())]
        group.turn += 1
        self.world.groups_of_kafka.rebalance(group)
        return True

    def overlap(self) -> bool:
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

    def recreate(self) -> bool:
        """A topic is deleted and made again."""
        self.lose_topic(self.rng.choice(self._topics()))
        return True

    def lose_topic(self, name: str, *, witness: bool | None = None) -> None:
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

    def trim(self) -> bool:
        """Retention takes the beginning of a topic."""
        name = self.rng.choice(self._topics())
        if name == ACCOUNTS_TOPIC and not self.world.checks.holder.is_sure:
            return False  # the holder's database was lost, and is made again from this
        topic = self.world.bus.topics[name]
        for number, log in enumerate(topic.partitions):
            self.world.bus.trim(name, number, self.rng.randint(log.low, log.high))
        return True

    def recreate_limits(self) -> bool:
        """The limits topic is lost by itself. What is in force stays so; only a lost database would miss it."""
        self.lose_topic(LIMITS_TOPIC)
        return True

    def trim_limits(self) -> bool:
        """Retention takes the beginning of the limits topic."""
        logs = enumerate(self.world.bus.topics[LIMITS_TOPIC].partitions)
        filled = [(number, log) for number, log in logs if log.messages]
        for number, log in filled:
            self.world.bus.trim(LIMITS_TOPIC, number, self.rng.randint(log.low + 1, log.high))
        return bool(filled)

    def more_partitions(self) -> bool:
        """A topic gets one more partition."""
        name = self.rng.choice(self._topics())
        self.world.bus.add_partitions(name, len(self.world.bus.topics[name].partitions) + 1)
        for group in self.world.groups_of_kafka.of.values():
            self.world.groups_of_kafka.rebalance(group)
        return True

    def go_away(self) -> bool:
        """The cluster does not answer for a while."""
        bus = self.world.bus
        if bus.is_down:
            return False
        bus.is_down = True
        self.world.at(self.rng.choice((1_000, 6_000, 20_000)), self.world.kafka_back)
        return True

    def broker_away(self) -> bool:
        """Celery's broker does not answer for a while."""
        self.world.broker_is_down = True
        self.world.at(self.rng.choice((1_000, 6_000)), lambda: setattr(self.world, "broker_is_down", False))
        return True

    def wipe_broker(self) -> bool:
        """It forgets everything."""
        for service in self.world.services:
            service.wipe_broker()
        return True
