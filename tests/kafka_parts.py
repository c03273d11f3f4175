"""What the tests of the Kafka parts share: settings, a database with both tables, an owner of a reader, publishing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import Producer, murmur2
from sqlalchemy import MetaData, Table

from celery_durable.kafka.client import producer_config
from celery_durable.kafka.consumer import Batch, PartitionReader
from celery_durable.kafka.opening import Opening
from celery_durable.kafka.settings import KafkaSettings
from celery_durable.store import offsets
from celery_durable.store.database import Database
from celery_durable.store.offsets import OffsetMoved, Position, offsets_table
from celery_durable.store.outbox import outbox_table
from tests.harness import MOCK_FETCH_WAIT_MS, wait_until

GROUP = "the-group"


def kafka_settings(bootstrap_servers: str, **changes: Any) -> KafkaSettings:
    """Settings for the mock cluster; ``changes`` win."""
    values: dict[str, Any] = {
        "kafka_bootstrap_servers": bootstrap_servers,
        "kafka_fetch_wait_max_ms": MOCK_FETCH_WAIT_MS,
        "kafka_session_timeout_ms": 1_500,
    }
    return KafkaSettings(**{**values, **changes})


@dataclass(frozen=True)
class Tables:
    """A database with an outbox and a table of offsets."""

    database: Database
    outbox: Table
    offsets: Table

    def positions(self, topic: str) -> Mapping[int, Position]:
        """The stored positions of the topic."""
        with self.database.reading() as connection:
            return offsets.load(connection, self.offsets, topic)


@contextmanager
def tables_in(url: str) -> Iterator[Tables]:
    """Makes the tables in the database of ``url``."""
    metadata = MetaData()
    tables = Tables(Database(url), outbox_table(metadata, "test_"), offsets_table(metadata, "test_"))
    metadata.create_all(tables.database.engine)
    try:
        yield tables
    finally:
        tables.database.dispose()


def values(count: int, first: int = 0) -> list[str]:
    """Values to publish, in their order as texts too."""
    return [f"{number:04}" for number in range(first, first + count)]


def publish(settings: KafkaSettings, topic: str, values: Sequence[str], partition: int | None = None) -> None:
    """Sends the values, each its own key, and waits for Kafka."""
    producer = Producer(producer_config(settings))
    where: dict[str, Any] = {} if partition is None else {"partition": partition}
    for value in values:
        producer.produce(topic, value.encode(), key=value.encode(), **where)
    assert producer.flush(20) == 0


def partition_of(key: str, partitions: int) -> int:
    """The partition that our producers and the Java clients give ``key`` in a topic of ``partitions``."""
    return int(murmur2(key.encode(), partitions))


@dataclass
class Owner:
    """Reads a topic as the holder does: effects (here: the values, in memory) only with a moved offset."""

    settings: KafkaSettings
    tables: Tables
    topic: str
    group_id: str = GROUP
    seen: list[str] = field(default_factory=list)
    openings: list[Opening] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    lost: int = 0
    reader: PartitionReader = field(init=False)

    def __post_init__(self) -> None:
        self.reader = PartitionReader(
            self.settings,
            topic=self.topic,
            group_id=self.group_id,
            load=lambda: self.tables.positions(self.topic),
            on_open=self.openings.extend,
            on_close=self.closed.extend,
        )

    def step(self, timeout_s: float = 0.1, limit: int = 100) -> list[Batch]:
        """Reads and commits once. Returns what was committed."""
        done = []
        for batch in self.reader.read(timeout_s, limit):
            if self.apply(batch):
                done.append(batch)
                self.reader.commit([batch])
        return done

    def apply(self, batch: Batch) -> bool:
        """The SQL transaction of one batch; drops the partition where it is lost."""
        try:
            with self.tables.database.transaction() as connection:
                offsets.advance(connection, self.tables.offsets, batch.old, batch.new)
        except OffsetMoved:
            self.lost += 1
            self.reader.drop(batch.partition)
            return False
        self.seen += [(message.value or b"").decode() for message in batch.messages]
        return True

    def read_until(self, count: int, deadline_s: float = 60) -> list[str]:
        """Steps until ``count`` values were seen, and returns them sorted."""
        wait_until(lambda: self.step() is not None and len(self.seen) >= count, deadline_s, what=f"{count} messages")
        return sorted(self.seen)

    def join(self, partitions: int, deadline_s: float = 60) -> None:
        """Steps until this member reads so many partitions."""
        wait_until(
            lambda: self.step() is not None and len(self.reader.partitions) == partitions,
            deadline_s,
            what=f"{partitions} partitions",
        )
