"""A Kafka of the simulator's own: topics, partitions, offsets, and what goes wrong with them.

What is produced is written after a delay, and so in another order. A message may be written twice, or not although its
delivery report says so (more than Kafka loses), or although the report is an error. Consumers see the log in order.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.kafka_parts import partition_of
from tests.simulation.clock import Clock


@dataclass(frozen=True, slots=True)
class Weather:
    """What goes wrong with messages, as probabilities and longest times."""

    loss: float = 0.0
    double: float = 0.0
    slow: float = 0.0
    slow_ms: int = 20_000
    error: float = 0.0
    commit_loss: float = 0.0


@dataclass(frozen=True, slots=True)
class Stored:
    """One message of a partition."""

    key: bytes | None
    value: bytes
    headers: tuple[tuple[str, bytes], ...]
    at_ms: int


@dataclass(slots=True)
class Log:
    """One partition: its first offset, and what it has from there."""

    low: int = 0
    messages: list[Stored] = field(default_factory=list)

    @property
    def high(self) -> int:
        """The offset that the next message gets."""
        return self.low + len(self.messages)

    def at(self, offset: int) -> Stored | None:
        """The message at ``offset``, if it is there."""
        return self.messages[offset - self.low] if self.low <= offset < self.high else None


@dataclass(slots=True)
class Topic:
    """A topic under its present ID."""

    name: str
    topic_id: str
    partitions: list[Log]


class Bus:
    """The cluster. ``at`` schedules, ``note`` writes the log, ``sent`` is told of every message."""

    def __init__(
        self,
        clock: Clock,
        rng: random.Random,
        at: Callable[[int, Callable[[], None]], None],
        note: Callable[..., None],
        sent: Callable[[str, Stored], None],
    ) -> None:
        self.clock = clock
        self.rng = rng
        self.at = at
        self.note = note
        self.weather = Weather()
        self.is_down = False
        self.topics: dict[str, Topic] = {}
        self.watchers: list[Callable[[str, int], None]] = []
        """Told of (topic, partition) that has something new: consumers that wait."""
        self._sent = sent
        self._ids = 0

    def create(self, name: str, partitions: int) -> None:
        """Creates the topic, in place of one that has this name."""
        self._ids += 1
        self.topics[name] = Topic(name, f"topic-{self._ids}", [Log() for _ in range(partitions)])

    def add_partitions(self, name: str, count: int) -> None:
        """Raises the topic's number of partitions: keys move."""
        topic = self.topics[name]
        topic.partitions += [Log() for _ in range(count - len(topic.partitions))]

    def trim(self, name: str, partition: int, low: int) -> None:
        """Retention takes what is before offset ``low``."""
        log = self.topics[name].partitions[partition]
        del log.messages[: max(0, low - log.low)]
        log.low = max(log.low, low)

    def happens(self, probability: float) -> bool:
        """Whether something of this probability happens now."""
        return probability > 0 and self.rng.random() < probability

    def write(self, name: str, message: Stored) -> bool:
        """Takes a message on its way. Returns whether the producer will hear that it was written."""
        weather = self.weather
        self._sent(name, message)
        failed = self.is_down or self.happens(weather.error)
        lost = (failed and self.rng.random() < 0.5) or self.happens(weather.loss)
        if self.is_down:
            lost = True
        if lost:
            self.note("bus", "lost" if not failed else "refused", name, message)
            return not failed
        for _ in range(1 + self.happens(weather.double)):
            delay_ms = self.rng.randint(1, 20)
            if self.happens(weather.slow):
                delay_ms = self.rng.randint(20, weather.slow_ms)
            self.at(delay_ms, lambda: self._append(name, message))
        return not failed

    def _append(self, name: str, message: Stored) -> None:
        topic = self.topics[name]
        key = (message.key or b"").decode()
        partition = partition_of(key, len(topic.partitions))
        written = Stored(message.key, message.value, message.headers, self.clock.now_ms)
        topic.partitions[partition].messages.append(written)
        self.note("bus", f"{partition}/{topic.partitions[partition].high - 1}", name, message)
        self.announce(name, partition)

    def announce(self, name: str, partition: int) -> None:
        """Wakes who waits for the partition."""
        for watcher in list(self.watchers):
            watcher(name, partition)
