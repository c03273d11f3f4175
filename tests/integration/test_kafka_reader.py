"""PartitionReader on the mock cluster: offsets that live in SQL, and the traps of consumer groups."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from celery_durable.kafka import consumer as consumer_module
from celery_durable.kafka.client import consumer_config
from celery_durable.kafka.consumer import PartitionReader
from celery_durable.kafka.opening import Witness
from celery_durable.kafka.received import place, read_to_end
from celery_durable.kafka.settings import KafkaSettings
from celery_durable.store import offsets
from celery_durable.store.offsets import Position
from tests.harness import wait_until, within
from tests.kafka_parts import GROUP, Owner, Tables, kafka_settings, publish, tables_in, values
from tests.mock_cluster import MockCluster, Request

TOPIC = "accounts"


@pytest.fixture
def cluster() -> Iterator[MockCluster]:
    with MockCluster() as cluster:
        cluster.create_topic(TOPIC, 4)
        yield cluster


@pytest.fixture(params=["classic", "consumer"])
def settings(request: pytest.FixtureRequest, cluster: MockCluster) -> KafkaSettings:
    """Both group protocols."""
    return kafka_settings(cluster.bootstrap_servers, kafka_group_protocol=request.param)


@pytest.fixture
def classic(cluster: MockCluster) -> KafkaSettings:
    return kafka_settings(cluster.bootstrap_servers)


def committed(settings: KafkaSettings, partition: int) -> TopicPartition:
    """The group's committed offset, asked by a client of its own."""
    consumer = Consumer(consumer_config(settings, GROUP))
    try:
        (found,) = consumer.committed([TopicPartition(TOPIC, partition)], 10)
        return found
    finally:
        consumer.close()


def test_reads_on_where_sql_says(settings: KafkaSettings, tables: Tables, owners: list[Owner]) -> None:
    publish(settings, TOPIC, values(20))
    owners.append(first := Owner(settings, tables, TOPIC))
    assert first.read_until(20) == values(20)
    first.reader.close()
    assert sorted(first.closed) == [0, 1, 2, 3]
    publish(settings, TOPIC, values(5, 20))
    owners.append(second := Owner(settings, tables, TOPIC))
    assert second.read_until(5) == values(5, 20)
    assert not any(opening.went_back or opening.recreated or opening.trimmed for opening in second.openings)


def test_order_within_a_partition_and_size_of_a_batch(
    classic: KafkaSettings, tables: Tables, owners: list[Owner]
) -> None:
    publish(classic, TOPIC, values(30), partition=2)
    owners.append(owner := Owner(classic, tables, TOPIC))
    wait_until(lambda: len(owner.seen) + len(owner.step(limit=7)) * 0 >= 30 or None, what="all messages")
    assert owner.seen == values(30)


def test_a_message_is_given_at_once(classic: KafkaSettings, tables: Tables, owners: list[Owner]) -> None:
    """`consume(n, timeout)` would wait for its whole timeout unless n messages came."""
    owners.append(owner := Owner(classic, tables, TOPIC))
    owner.join(4)
    publish(classic, TOPIC, ["one"])
    with within(25, "the message, though the reader may wait 60 s for more"):
        while not owner.seen:
            owner.step(timeout_s=60)


def test_kafka_is_told_after_sql_with_the_topic_id(classic: KafkaSettings, tables: Tables, owners: list[Owner]) -> None:
    """Section 8: the witness that tells a database which went back."""
    publish(classic, TOPIC, values(3), partition=1)
    owners.append(owner := Owner(classic, tables, TOPIC))
    owner.read_until(3)
    stored = tables.positions(TOPIC)[1]
    assert stored.next_offset == 3
    found = wait_until(lambda: found if (found := committed(classic, 1)).offset == 3 else None)
    assert found.metadata == stored.topic_id


def test_what_was_not_committed_is_given_again(classic: KafkaSettings, tables: Tables, owners: list[Owner]) -> None:
    """An owner whose transaction failed has nothing to undo."""
    publish(classic, TOPIC, values(5), partition=0)
    owners.append(owner := Owner(classic, tables, TOPIC))
    (lost,) = wait_until(lambda: owner.reader.read(0.1, 100) or None)
    assert len(lost.messages) == 5
    assert owner.read_until(5) == values(5)
    assert owner.closed == [0]
    assert tables.positions(TOPIC)[0].next_offset == 5


def test_two_members_share_the_partitions(settings: KafkaSettings, tables: Tables, owners: list[Owner]) -> None:
    """Each message is applied once, before, while and after the partitions move."""
    owners.append(first := Owner(settings, tables, TOPIC))
    first.join(4)
    publish(settings, TOPIC, values(40))
    first.read_until(40)
    owners.append(second := Owner(settings, tables, TOPIC))

    def shared() -> bool:
        first.step()
        second.step()
        return len(first.reader.partitions) == len(second.reader.partitions) == 2

    wait_until(shared, 30, what="two partitions each")
    publish(settings, TOPIC, values(40, 40))
    wait_until(lambda: shared() and len(first.seen) + len(second.seen) >= 80, 30, what="all messages")
    assert sorted(first.seen + second.seen) == values(80)
    assert second.seen
    assert not first.lost + second.lost
    second.reader.close()
    first.join(4, 30)


def test_a_zombie_commits_nothing(classic: KafkaSettings, tables: Tables, owners: list[Owner]) -> None:
    """A17, B9: two members that both believe they own the partitions; the one whose offset moved drops them."""
    other_group = classic.model_copy()
    owners.append(zombie := Owner(classic, tables, TOPIC, group_id="zombie"))
    owners.append(owner := Owner(other_group, tables, TOPIC, group_id="owner"))
    zombie.join(4)
    owner.join(4)
    publish(classic, TOPIC, values(8), partition=3)
    (batch,) = wait_until(lambda: zombie.reader.read(0.1, 100) or None)
    owner.read_until(8)
    assert not zombie.apply(batch)
    assert zombie.lost == 1
    assert 3 not in zombie.reader.partitions
    zombie.reader.commit([batch])
    publish(classic, TOPIC, values(2, 8), partition=3)
    wait_until(lambda: zombie.step() is not None and owner.step() is not None and len(owner.seen + zombie.seen) >= 10)
    assert sorted(owner.seen + zombie.seen) == values(10)


def test_a_dropped_partition_is_opened_again_where_sql_says(
    classic: KafkaSettings, tables: Tables, owners: list[Owner]
) -> None:
    """The rightful owner that lost to a zombie's last commit goes on."""
    owners.append(owner := Owner(classic, tables, TOPIC))
    owner.join(4)
    publish(classic, TOPIC, values(6), partition=3)
    topic_id = owner.openings[0].topic_id
    with tables.database.transaction() as connection:
        offsets.advance(connection, tables.offsets, None, Position(TOPIC, 3, topic_id, 4))
    assert owner.read_until(2) == values(2, 4)
    assert owner.lost == 1
    assert owner.closed == [3]


def test_a_dropped_partition_that_moves_and_comes_back_is_read(
    settings: KafkaSettings, tables: Tables, owners: list[Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drop pauses the partition: a new assignment does not inherit the pause."""
    owners.append(first := Owner(settings, tables, TOPIC))
    first.join(4)
    monkeypatch.setattr(consumer_module, "DROPPED_S", 3_600.0)
    for partition in range(4):
        first.reader.drop(partition)
    owners.append(second := Owner(settings, tables, TOPIC))
    wait_until(lambda: first.step() is not None and second.step() is not None and len(second.reader.partitions) == 2)
    moved = second.reader.partitions
    assert first.reader.partitions == frozenset()
    second.reader.close()
    first.join(2)
    assert first.reader.partitions == moved
    for partition in moved:
        publish(settings, TOPIC, values(3, 10 * partition), partition=partition)
    assert first.read_until(6) == sorted(value for partition in moved for value in values(3, 10 * partition))


def test_on_open_that_raises_gives_no_message(settings: KafkaSettings, tables: Tables, owners: list[Owner]) -> None:
    """librdkafka assigns at its own offsets when `on_assign` raises, and delivers: nothing of that comes through."""
    publish(settings, TOPIC, values(40))
    failing = True

    def on_open(openings: object) -> None:
        if failing:
            raise ConnectionError("the database is away")

    reader = PartitionReader(
        settings, topic=TOPIC, group_id=GROUP, load=lambda: tables.positions(TOPIC), on_open=on_open
    )
    try:
        raised = 0
        deadline = time.monotonic() + 20
        while raised < 3 and time.monotonic() < deadline:
            try:
                assert reader.read(0.2, 100) == []
            except ConnectionError:
                raised += 1
                assert reader.partitions == frozenset()
        assert raised == 3
        failing = False
        received: list[int] = []
        while len(received) < 40 and time.monotonic() < deadline:
            for batch in reader.read(0.2, 100):
                received += [message.offset for message in batch.messages]
                with tables.database.transaction() as connection:
                    offsets.advance(connection, tables.offsets, batch.old, batch.new)
                reader.commit([batch])
        assert len(received) == 40
    finally:
        reader.close()


def test_a_database_that_went_back_is_noticed(
    classic: KafkaSettings, tables: Tables, tmp_path: Path, owners: list[Owner]
) -> None:
    """A18, A19: the stored offset is behind the committed one, read before it; a lost database has none."""
    publish(classic, TOPIC, values(6), partition=0)
    owner = Owner(classic, tables, TOPIC)
    owner.read_until(6)
    wait_until(lambda: committed(classic, 0).offset == 6)
    owner.reader.close()
    with tables.database.transaction() as connection:
        now = tables.positions(TOPIC)[0]
        offsets.advance(connection, tables.offsets, now, Position(TOPIC, 0, now.topic_id, 2))
    owners.append(restored := Owner(classic, tables, TOPIC))
    assert restored.read_until(4) == values(4, 2)
    assert [opening.partition for opening in restored.openings if opening.went_back] == [0]
    restored.reader.close()
    with tables_in(f"sqlite:///{tmp_path / 'new.sqlite3'}") as new:
        owners.append(lost := Owner(classic, new, TOPIC))
        assert lost.read_until(6) == values(6)
        assert [opening.partition for opening in lost.openings if opening.went_back] == [0]


def test_a_topic_that_ends_before_the_stored_offset_is_read_from_its_start(
    classic: KafkaSettings, tables: Tables, owners: list[Owner]
) -> None:
    """B8, on the embedded broker too: it forgets everything when it restarts."""
    publish(classic, TOPIC, values(3), partition=0)
    with tables.database.transaction() as connection:
        offsets.advance(connection, tables.offsets, None, Position(TOPIC, 0, "an earlier topic", 2))
    owners.append(owner := Owner(classic, tables, TOPIC))
    assert owner.read_until(3) == values(3)
    assert [opening.recreated for opening in owner.openings if opening.partition == 0] == [True]
    assert tables.positions(TOPIC)[0].topic_id != "an earlier topic"


def test_an_offset_that_is_gone_while_reading_leads_to_a_new_look(
    cluster: MockCluster, classic: KafkaSettings, tables: Tables, owners: list[Owner]
) -> None:
    """B8: `auto.offset.reset=error` tells, and the partition is opened again instead of jumping."""
    owners.append(owner := Owner(classic, tables, TOPIC))
    owner.join(4)
    cluster.fail(Request.FETCH, [KafkaError.OFFSET_OUT_OF_RANGE])
    wait_until(lambda: owner.step() is not None and len(owner.openings) >= 8, what="a second opening")
    publish(classic, TOPIC, values(4))
    assert owner.read_until(4) == values(4)


def test_a_missing_topic_is_waited_for(classic: KafkaSettings, tables: Tables, owners: list[Owner]) -> None:
    owners.append(owner := Owner(classic, tables, "made-on-first-use"))
    owner.join(4)
    publish(classic, "made-on-first-use", ["x"])
    assert owner.read_until(1) == ["x"]


def test_a_gap_is_looked_at_once(
    classic: KafkaSettings, tables: Tables, owners: list[Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A jump within a partition is a loss until the topic was looked at again; what lies behind it is read then."""
    owners.append(owner := Owner(classic, tables, TOPIC))
    owner.join(4)
    publish(classic, TOPIC, values(3), partition=1)
    owner.read_until(3)

    def jumping(message: Message) -> tuple[int, int]:
        partition, offset = place(message)
        return partition, offset + 5 if partition == 1 and offset >= 3 else offset

    monkeypatch.setattr(consumer_module, "place", jumping)
    publish(classic, TOPIC, values(2, 3), partition=1)
    wait_until(lambda: owner.step() is not None and len(owner.openings) >= 8, what="a second opening")
    assert owner.read_until(5) == values(5)


def test_kafka_away_at_the_start_is_an_error_and_nothing_more(tables: Tables) -> None:
    from confluent_kafka import KafkaException

    settings = kafka_settings("127.0.0.1:23099", kafka_options={"socket.connection.setup.timeout.ms": 1_000})
    owner = Owner(settings, tables, TOPIC)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("celery_durable.kafka.client.ANSWER_S", 0.5)
        for _ in range(2):
            with pytest.raises(KafkaException):
                owner.step()
    owner.reader.close()


def test_a_consumer_that_never_closes_is_left_behind(
    classic: KafkaSettings, tables: Tables, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """librdkafka's close may wait for ever: whoever ends must not."""
    at_last = threading.Event()

    class Stuck(Consumer):
        def close(self) -> None:
            assert at_last.wait(60)
            super().close()

    monkeypatch.setattr("celery_durable.kafka.client.Consumer", Stuck)
    monkeypatch.setattr(consumer_module, "CLOSE_S", 0.2)
    owner = Owner(classic, tables, TOPIC)
    owner.join(4)
    with within(30, "the end of a close that takes 60 s"):
        owner.reader.close()
    assert "left behind" in caplog.text
    at_last.set()
    wait_until(lambda: all(thread.name != "consumer-close" for thread in threading.enumerate()))


def test_a_reader_left_behind_without_kafka_harms_no_later_one(
    cluster: MockCluster,
    settings: KafkaSettings,
    tables: Tables,
    owners: list[Owner],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An offset whose commit Kafka never answered keeps librdkafka's close from ending (its issue 3740)."""
    left = Owner(settings, tables, TOPIC)
    left.join(4)
    publish(settings, TOPIC, values(3), partition=0)
    (batch,) = wait_until(lambda: left.reader.read(0.1, 100) or None)
    cluster.down(1)
    assert left.apply(batch)
    left.reader.commit([batch])
    with monkeypatch.context() as patch:
        patch.setattr(consumer_module, "CLOSE_S", 0.3)
        left.reader.close()
    assert "left behind" in caplog.text
    cluster.up(1)
    owners.append(owner := Owner(settings, tables, TOPIC))
    owner.join(4)
    publish(settings, TOPIC, values(3, 3), partition=0)
    assert owner.read_until(3) == values(3, 3)
    wait_until(lambda: all(thread.name != "consumer-close" for thread in threading.enumerate()), 60)
    wait_until(lambda: committed(settings, 0).offset == 6)
    assert sorted(left.closed) == [0, 1, 2, 3]
    assert owner.closed == []
    assert not any(opening.went_back for opening in owner.openings)


def test_a_process_ends_whose_consumer_never_closes(tmp_path: Path) -> None:
    """The broker dies with an offset's commit on its way to it."""
    script = tmp_path / "reads_and_ends.py"
    script.write_text(_READS_AND_ENDS)
    ended = subprocess.run(
        [sys.executable, str(script), f"sqlite:///{tmp_path / 'ends.sqlite3'}"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": "."},
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "closed, still closing: 1\n"


_READS_AND_ENDS = """
import sys, threading
from celery_durable.kafka import consumer
from tests.harness import wait_until
from tests.kafka_parts import Owner, kafka_settings, publish, tables_in
from tests.mock_cluster import MockCluster

consumer.CLOSE_S = 0.3
cluster = MockCluster()
settings = kafka_settings(cluster.bootstrap_servers)
with tables_in(sys.argv[1]) as tables:
    owner = Owner(settings, tables, "accounts")
    owner.join(4)
    publish(settings, "accounts", ["x"])
    (batch,) = wait_until(lambda: owner.reader.read(0.1, 100) or None)
    cluster.down(1)
    assert owner.apply(batch)
    owner.reader.commit([batch])
    owner.reader.close()
print("closed, still closing:", sum(thread.name == "consumer-close" for thread in threading.enumerate()))
"""


class _Loud(Consumer):
    """Logs to stderr from librdkafka's own threads; through a logger it would only when somebody polls. Nobody does."""

    def __init__(self, config: dict[str, Any], logger: object = None) -> None:
        super().__init__({**config, "debug": "cgrp"})

    def poll(self, timeout: float = -1) -> None:
        """Serves no callback, however late the test's thread gets to run."""


def test_what_is_assigned_while_closing_is_not_opened(
    settings: KafkaSettings, tables: Tables, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A consumer that is being closed gets no committed offsets any more: it would wait in vain for them."""
    monkeypatch.setattr("celery_durable.kafka.client.Consumer", _Loud)
    loaded = []

    def load() -> Mapping[int, Position]:
        loaded.append(threading.current_thread().name)
        return {}

    def asked(*_: object) -> dict[int, Witness]:
        loaded.append("committed offsets")
        return {}

    monkeypatch.setattr(consumer_module, "witnesses", asked)
    reader = PartitionReader(settings, topic=TOPIC, group_id=GROUP, load=load)
    reader.read(0, 1)
    said = ""

    def assigned() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return "-> wait-assign-call" in said

    wait_until(assigned, what="an assignment that nobody has polled for")
    reader.close()
    assert loaded == []


def test_a_consumer_left_behind_takes_nothing_from_its_successor(
    cluster: MockCluster, classic: KafkaSettings, tables: Tables, owners: list[Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be told late that its partitions were revoked: the reader has a new consumer by then."""
    revoked: list[Callable[[object, list[TopicPartition]], None]] = []

    class Telling(Consumer):
        def subscribe(self, topics: list[str], **callbacks: Any) -> None:
            revoked.append(callbacks["on_revoke"])
            super().subscribe(topics, **callbacks)

    monkeypatch.setattr("celery_durable.kafka.client.Consumer", Telling)
    owners.append(owner := Owner(classic, tables, TOPIC))
    owner.join(4)
    cluster.fail(Request.FETCH, [KafkaError.OFFSET_OUT_OF_RANGE])
    wait_until(lambda: owner.step() is not None and len(owner.openings) >= 8, what="a second consumer")
    publish(classic, TOPIC, values(3), partition=0)
    wait_until(lambda: owner.reader.read(0.1, 100) or None)
    revoked[0](Mock(), [TopicPartition(TOPIC, 0)])
    assert owner.read_until(3, deadline_s=20) == values(3)


def test_read_to_end(classic: KafkaSettings) -> None:
    """The limits mirror: all of it, without a group, and nothing where there is no topic."""
    publish(classic, "limits", values(50))
    received = list(read_to_end(classic, "limits"))
    assert sorted((message.value or b"").decode() for message in received) == values(50)
    assert list(read_to_end(classic, "no-such-topic")) == []


def test_reading_to_the_end_may_take_long_as_long_as_something_comes(
    cluster: MockCluster, classic: KafkaSettings
) -> None:
    """A rebuild merges what it reads: of millions of messages that takes hours, and must not begin again and again."""
    publish(classic, "limits", values(30), partition=0)
    read = []
    for message in read_to_end(classic, "limits", silence_max_s=0.5):
        time.sleep(0.05)  # what is done with it takes longer than Kafka may be silent
        read.append(message)
    assert len(read) == 30
    cluster.fail(Request.FETCH, [KafkaError.NOT_LEADER_FOR_PARTITION] * 10_000)
    with pytest.raises(TimeoutError, match="limits: not read to its end: Kafka gave nothing for"):
        list(read_to_end(classic, "limits", silence_max_s=0.5))
