"""Producers, consumers, groups and the admin client of the simulated bus, as confluent_kafka's look to this project."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from tests.simulation.bus import Bus, Stored


def _away() -> KafkaException:
    return KafkaException(KafkaError(KafkaError._TRANSPORT, "the simulated cluster is down"))


@dataclass(frozen=True, slots=True)
class SimulatedMessage:
    """What a consumer gets: a message, or an error of a partition."""

    place: tuple[str, int, int]
    stored: Stored | None
    failure: KafkaError | None = None

    def error(self) -> KafkaError | None:
        return self.failure

    def topic(self) -> str:
        return self.place[0]

    def partition(self) -> int:
        return self.place[1]

    def offset(self) -> int:
        return self.place[2]

    def key(self) -> bytes | None:
        return self.stored.key if self.stored else None

    def value(self) -> bytes | None:
        return self.stored.value if self.stored else None

    def headers(self) -> list[tuple[str, bytes]]:
        return list(self.stored.headers) if self.stored else []

    def timestamp(self) -> tuple[int, int]:
        return 1, self.stored.at_ms if self.stored else 0


class SimulatedProducer:
    """Delivery reports come with :meth:`poll`, some time after the message was taken."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._reports: deque[tuple[int, Callable[..., None], KafkaError | None]] = deque()

    def produce(self, topic: str, *, value: bytes, key: bytes | None, headers: Any, on_delivery: Any) -> None:
        """Sends one message."""
        pairs = tuple((name, str(text).encode()) for name, text in sorted((headers or {}).items()))
        written = self._bus.write(topic, Stored(key, value, pairs, 0))
        error = None if written else KafkaError(KafkaError._MSG_TIMED_OUT, "simulated error")
        now_ms = self._bus.clock.now_ms
        at_ms = self._reports[-1][0] if self._reports else now_ms + self._bus.rng.randint(1, 20)
        if not written:
            at_ms += self._bus.rng.randint(20, 1_000)
        self._reports.append((at_ms, on_delivery, error))

    def poll(self, timeout_s: float) -> int:
        """Serves the reports that have come; if none has, waits for the next one as long as that takes."""
        served = 0
        while self._reports and self._reports[0][0] <= self._bus.clock.now_ms:
            _, on_delivery, error = self._reports.popleft()
            on_delivery(error, None)
            served += 1
        if not served and timeout_s > 0:
            next_s = (self._reports[0][0] - self._bus.clock.now_ms) / 1000 if self._reports else timeout_s
            self._bus.clock.sleep(min(timeout_s, next_s))
        return served

    def purge(self) -> None:
        """Gives all up that was not reported yet."""
        error = KafkaError(KafkaError._PURGE_QUEUE, "purged")
        self._reports = deque((self._bus.clock.now_ms, on_delivery, error) for _, on_delivery, _ in self._reports)


@dataclass(eq=False, slots=True)
class Group:
    """A consumer group: its members in the order of joining, and what it committed."""

    topic: str
    members: list[SimulatedConsumer] = field(default_factory=list)
    committed: dict[int, tuple[int, str]] = field(default_factory=dict)
    turn: int = 0
    overlaps: bool = False
    """A fault: partitions are given to their next owner before the last one knows."""

    def target(self, partitions: int) -> dict[int, SimulatedConsumer]:
        """Who is to have each partition."""
        if not self.members:
            return {}
        return {number: self.members[(number + self.turn) % len(self.members)] for number in range(partitions)}


class Groups:
    """The coordinator."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.of: dict[str, Group] = {}

    def group(self, group_id: str, topic: str) -> Group:
        """The group with this ID."""
        return self.of.setdefault(group_id, Group(topic))

    def joined(self, group: Group, consumer: SimulatedConsumer) -> None:
        """A member joins, or comes back."""
        if consumer not in group.members:
            group.members.append(consumer)
            self.rebalance(group)

    def left(self, group: Group, consumer: SimulatedConsumer) -> None:
        """A member leaves, or its session is over."""
        if consumer in group.members:
            group.members.remove(consumer)
            self.rebalance(group)

    def rebalance(self, group: Group) -> None:
        """Tells the members to look at what they are to have."""
        for member in group.members:
            member.wake()


class SimulatedConsumer:
    """One consumer: a member of a group after ``subscribe``, alone after ``assign``."""

    def __init__(
        self, bus: Bus, groups: Groups, group_id: str, wake: Callable[[], None], is_alive: Callable[[], bool]
    ) -> None:
        self._bus = bus
        self._groups = groups
        self._group_id = group_id
        self._is_alive = is_alive
        self.wake = wake
        self._group: Group | None = None
        self._topic = ""
        self._topic_id = ""
        self._positions: dict[int, int] = {}
        self._paused: set[int] = set()
        self._callbacks: dict[str, Callable[..., None]] = {}
        self._errors: deque[SimulatedMessage] = deque()
        self._ends_told: set[int] = set()
        self.partition_eof = False
        self.closed = False
        self.deaf_until_ms = 0
        """Until then it does not hear what the group decides."""
        bus.watchers.append(self._announced)

    # Membership

    def subscribe(self, topics: Sequence[str], **callbacks: Callable[..., None]) -> None:
        """Joins the group."""
        self._topic = topics[0]
        self._topic_id = self._bus.topics[self._topic].topic_id
        self._callbacks = callbacks
        self._group = self._groups.group(self._group_id, self._topic)
        self._groups.joined(self._group, self)

    @property
    def assigned(self) -> list[int]:
        """The partitions that it believes to have."""
        return sorted(self._positions)

    def expire(self) -> None:
        """Its session is over: the group goes on without it. It hears of that when it polls again, if it ever does."""
        if self._group is not None:
            self._groups.left(self._group, self)

    def close(self) -> None:
        """Leaves the group."""
        if self.closed or not self._is_alive():
            return
        self.closed = True
        self._positions.clear()
        self.abandon()
        if self._group is not None:
            self._groups.left(self._group, self)

    def abandon(self) -> None:
        """Nobody polls it any more."""
        if self._announced in self._bus.watchers:
            self._bus.watchers.remove(self._announced)

    def _follow_group(self) -> None:
        group = self._group
        if group is None or self._bus.is_down or self._bus.clock.now_ms < self.deaf_until_ms:
            return
        if self not in group.members:
            if self._positions:
                self._call("on_lost", list(self.assigned))
            self._groups.joined(group, self)
        target = group.target(len(self._bus.topics[self._topic].partitions))
        gone = [number for number in self.assigned if target.get(number) is not self]
        if gone:
            self._call("on_revoke", gone)
            self._groups.rebalance(group)
        others = {number for member in group.members if member is not self for number in member.assigned}
        new = [
            number
            for number, member in target.items()
            if member is self and number not in self._positions and (group.overlaps or number not in others)
        ]
        if new:
            self._call("on_assign", new)

    def _call(self, name: str, numbers: list[int]) -> None:
        self._callbacks[name](self, [TopicPartition(self._topic, number) for number in numbers])

    # Assignment

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Reads these, without a group."""
        for one in partitions:
            self._topic = one.topic
            self._positions[one.partition] = one.offset
        if self._topic:
            self._topic_id = self._bus.topics[self._topic].topic_id

    def incremental_assign(self, partitions: Iterable[TopicPartition]) -> None:
        self.assign(partitions)

    def incremental_unassign(self, partitions: Iterable[TopicPartition]) -> None:
        for one in partitions:
            self._positions.pop(one.partition, None)

    def seek(self, partition: TopicPartition) -> None:
        if partition.partition in self._positions:
            self._positions[partition.partition] = partition.offset

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        self._paused.update(one.partition for one in partitions)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        self._paused.difference_update(one.partition for one in partitions)

    # Reading

    def poll(self, timeout_s: float) -> SimulatedMessage | None:
        """The next message, or None after as long a wait as there is nothing."""
        self._follow_group()
        message = self._next()
        if message is None:
            self._bus.clock.sleep(timeout_s)
        return message

    def consume(self, limit: int, _timeout_s: float) -> list[SimulatedMessage]:
        """What is there."""
        found: list[SimulatedMessage] = []
        while len(found) < limit and (message := self._next()) is not None:
            found.append(message)
        return found

    def _next(self) -> SimulatedMessage | None:
        if self._bus.is_down:
            return None
        topic = self._bus.topics.get(self._topic)
        if topic is None:
            return None
        for number in self.assigned:
            if number in self._paused or number >= len(topic.partitions):
                continue
            log, offset = topic.partitions[number], self._positions[number]
            if not log.low <= offset <= log.high:
                self._paused.add(number)
                error = KafkaError(KafkaError._AUTO_OFFSET_RESET, "simulated: offset out of range")
                return SimulatedMessage((self._topic, number, offset), None, error)
            stored = log.at(offset)
            if stored is not None:
                self._positions[number] = offset + 1
                return SimulatedMessage((self._topic, number, offset), stored)
            if self.partition_eof and number not in self._ends_told:
                self._ends_told.add(number)
                error = KafkaError(KafkaError._PARTITION_EOF)
                return SimulatedMessage((self._topic, number, offset), None, error)
        return None

    def _announced(self, topic: str, partition: int) -> None:
        if topic == self._topic and partition in self._positions:
            self.wake()

    # Questions

    def list_topics(self, topic: str, timeout: float) -> Any:
        return cluster_metadata(self._bus, topic)

    def get_watermark_offsets(self, partition: TopicPartition, timeout: float = 0.0) -> tuple[int, int]:
        if self._bus.is_down:
            raise _away()
        log = self._bus.topics[partition.topic].partitions[partition.partition]
        return log.low, log.high

    def committed(self, partitions: Sequence[TopicPartition], timeout: float = 0.0) -> list[TopicPartition]:
        if self._bus.is_down:
            raise _away()
        known = self._groups.of[self._group_id].committed if self._group_id in self._groups.of else {}
        found = []
        for one in partitions:
            offset, metadata = known.get(one.partition, (-1001, ""))
            found.append(TopicPartition(one.topic, one.partition, offset, metadata))
        return found

    def commit(self, *, offsets: Sequence[TopicPartition], asynchronous: bool) -> None:
        """Commits, if nothing is in the way: nobody waits for the answer."""
        group = self._group
        if group is None or self not in group.members or self._bus.is_down:
            return
        if self._bus.happens(self._bus.weather.commit_loss):
            self._bus.note("bus", "a commit of the group is lost", self._topic, None)
            return
        for one in offsets:
            group.committed[one.partition] = (one.offset, one.metadata or "")


class _Metadata:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def cluster_metadata(bus: Bus, topic: str) -> Any:
    """What ``list_topics`` answers."""
    if bus.is_down:
        raise _away()
    found = bus.topics.get(topic)
    error = None if found else KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
    partitions = dict.fromkeys(range(len(found.partitions))) if found else {}
    return _Metadata(cluster_id="simulated", topics={topic: _Metadata(error=error, partitions=partitions)})


class _Answer:
    """A future that is done."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return self._result if isinstance(self._result, BaseException) else None

    def result(self, timeout: float | None = None) -> Any:
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result


class SimulatedAdmin:
    """The admin client, as far as topics are identified by it."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def list_topics(self, topic: str, timeout: float) -> Any:
        return cluster_metadata(self._bus, topic)

    def describe_topics(self, topics: Any, *, request_timeout: float) -> dict[str, _Answer]:
        """The topic's ID."""
        answers: dict[str, _Answer] = {}
        for name in topics.topic_names:
            topic = self._bus.topics.get(name)
            if self._bus.is_down:
                answers[name] = _Answer(_away())
            elif topic is None:
                answers[name] = _Answer(KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)))
            else:
                answers[name] = _Answer(_Metadata(topic_id=topic.topic_id))
        return answers
