"""What only a real Kafka does: topics that are recreated, trimmed and grown, members that stall, a broker that dies."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic  # type: ignore[attr-defined]

from celery_durable.kafka import client, topic_watch
from celery_durable.kafka import consumer as consumer_module
from celery_durable.kafka.client import make_admin, make_consumer, producer_config
from celery_durable.kafka.relay import Relay
from celery_durable.kafka.settings import KafkaSettings
from celery_durable.kafka.topics import apply, client_topics, holder_topics
from celery_durable.scheduling.loop import Loop
from celery_durable.store import offsets, outbox
from celery_durable.store.offsets import Position
from celery_durable.store.outbox import Staged
from tests.harness import Kafka, wait_until, within
from tests.kafka_parts import GROUP, Owner, Tables, kafka_settings, publish, values
from tests.services import KafkaBroker

pytestmark = pytest.mark.kafka


@pytest.fixture
def settings(apache_kafka: Kafka) -> KafkaSettings:
    values = apache_kafka.settings | {"kafka_session_timeout_ms": 2_000, "kafka_fetch_wait_max_ms": 100}
    return kafka_settings(apache_kafka.bootstrap_servers, **values)


@pytest.fixture
def topic(settings: KafkaSettings) -> str:
    create(make_admin(settings), settings.accounts_topic)
    return settings.accounts_topic


def create(admin: AdminClient, topic: str, partitions: int = 2, **config: Any) -> None:
    wait_until(lambda: topic not in admin.list_topics(timeout=10).topics, what=f"{topic} is gone")
    for future in admin.create_topics([NewTopic(topic, partitions, 1, config=config)]).values():
        future.result(30)
    wait_until(lambda: len(admin.list_topics(timeout=10).topics.get(topic, _None).partitions) == partitions)


class _None:
    partitions: tuple[()] = ()


def recreate(settings: KafkaSettings, topic: str) -> None:
    admin = make_admin(settings)
    for future in admin.delete_topics([topic]).values():
        future.result(30)
    create(admin, topic)


def test_topics_apply(settings: KafkaSettings) -> None:
    """It creates what is missing, finds it in order, and names what differs without changing it."""
    plans = [*client_topics(settings, "billing"), *holder_topics(settings)]
    plans = list({plan.name: plan for plan in plans}.values())
    optional = {plan.name for plan in plans if plan.optional}

    def states(*, made: bool = True) -> dict[str, str]:
        return {result.name: result.state for result in apply(settings, plans, create=made)}

    def every(state: str) -> dict[str, str]:
        return {plan.name: "unused" if plan.name in optional else state for plan in plans}

    assert states(made=False) == every("missing")
    assert states() == every("created")
    wait_until(lambda: states() == every("ok"))
    bigger = [plan.__class__(plan.name, plan.partitions + 1, {"cleanup.policy": "compact"}, "") for plan in plans[:1]]
    (result,) = apply(settings, bigger)
    assert result.state == "differs"
    assert [difference.split(":")[0] for difference in result.differences] == ["partitions", "cleanup.policy"]
    assert states() == every("ok")


def test_a_topic_recreated_while_it_is_read(
    settings: KafkaSettings, topic: str, tables: Tables, owners: list[Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B8: messages below the old offset are not missed."""
    monkeypatch.setattr(topic_watch, "LOOK_EVERY_S", 0.5)
    publish(settings, topic, values(3), partition=0)
    owners.append(owner := Owner(settings, tables, topic))
    owner.read_until(3)
    before = tables.positions(topic)[0]
    recreate(settings, topic)
    publish(settings, topic, values(6, 10), partition=0)
    wait_until(lambda: owner.step() is not None and set(owner.seen) >= set(values(6, 10)), 40)
    wait_until(lambda: owner.step() is not None and tables.positions(topic)[0].topic_id != before.topic_id, 40)
    assert tables.positions(topic)[0].next_offset == 6
    assert any(opening.recreated for opening in owner.openings)
    assert not any(opening.went_back for opening in owner.openings)


def test_a_topic_recreated_while_nobody_read_it(
    settings: KafkaSettings, topic: str, tables: Tables, owners: list[Owner]
) -> None:
    """B8: although the new topic reaches beyond the stored offset."""
    publish(settings, topic, values(3), partition=0)
    owner = Owner(settings, tables, topic)
    owner.read_until(3)
    owner.reader.close()
    recreate(settings, topic)
    publish(settings, topic, values(6, 10), partition=0)
    owners.append(again := Owner(settings, tables, topic))
    assert again.read_until(6) == values(6, 10)
    assert [opening.recreated for opening in again.openings if opening.partition == 0] == [True]
    assert not any(opening.went_back for opening in again.openings)


def test_a_topic_trimmed_below_the_stored_offset(
    settings: KafkaSettings, topic: str, tables: Tables, owners: list[Owner]
) -> None:
    """B8: retention took what was not read; what is left is read, and it is said."""
    publish(settings, topic, values(3), partition=0)
    owner = Owner(settings, tables, topic)
    owner.read_until(3)
    owner.reader.close()
    publish(settings, topic, values(7, 3), partition=0)
    admin = make_admin(settings)
    for future in admin.delete_records([TopicPartition(topic, 0, 8)]).values():
        future.result(30)
    owners.append(again := Owner(settings, tables, topic))
    assert again.read_until(2) == values(2, 8)
    assert [opening.trimmed for opening in again.openings if opening.partition == 0] == [True]


def test_a_raised_partition_count_is_noticed(
    settings: KafkaSettings, topic: str, tables: Tables, owners: list[Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B10: new partitions are read from their start."""
    monkeypatch.setattr(client, "_METADATA_REFRESH_MS", 500)
    owners.append(owner := Owner(settings, tables, topic))
    owner.join(2)
    admin = make_admin(settings)
    for future in admin.create_partitions([NewPartitions(topic, 5)]).values():
        future.result(30)
    wait_until(lambda: len(admin.list_topics(topic, timeout=10).topics[topic].partitions) == 5)
    publish(settings, topic, values(50))
    assert owner.read_until(50, 40) == values(50)
    assert owner.reader.partitions == frozenset(range(5))
    assert not any(opening.went_back or opening.recreated or opening.trimmed for opening in owner.openings)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_two_members_share_and_a_dead_one_is_replaced(
    settings: KafkaSettings, topic: str, tables: Tables, owners: list[Owner], protocol: str
) -> None:
    settings = settings.model_copy(update={"kafka_group_protocol": protocol})
    owners.append(first := Owner(settings, tables, topic))
    first.join(2)
    owners.append(second := Owner(settings, tables, topic))

    def shared() -> bool:
        first.step()
        second.step()
        return len(first.reader.partitions) == len(second.reader.partitions) == 1

    wait_until(shared, 40, what="one partition each")
    publish(settings, topic, values(40))
    wait_until(lambda: shared() and len(first.seen + second.seen) >= 40)
    assert sorted(first.seen + second.seen) == values(40)
    first.reader.close()
    second.join(2, 40)


def test_a_member_past_its_poll_interval_commits_nothing(
    settings: KafkaSettings, topic: str, tables: Tables, owners: list[Owner]
) -> None:
    """B9: it stalls with a batch in its hands; its successor applies that batch, and it drops the partition."""
    settings = settings.model_copy(update={"kafka_max_poll_interval_ms": 2_500})
    owners.append(stalled := Owner(settings, tables, topic))
    stalled.join(2)
    publish(settings, topic, values(5), partition=0)
    (batch,) = wait_until(lambda: stalled.reader.read(0.2, 100) or None)
    owners.append(successor := Owner(settings, tables, topic))
    assert successor.read_until(5, 40) == values(5)
    assert not stalled.apply(batch)
    assert stalled.seen == []
    publish(settings, topic, values(20, 5))
    wait_until(
        lambda: stalled.step() is not None and successor.step() is not None and len(stalled.seen + successor.seen) >= 25
    )
    assert sorted(stalled.seen + successor.seen) == values(25)


def test_a_database_that_went_back(settings: KafkaSettings, topic: str, tables: Tables, owners: list[Owner]) -> None:
    """A18: the committed offset carries the topic's ID, and outlives the member."""
    publish(settings, topic, values(6), partition=1)
    owner = Owner(settings, tables, topic)
    owner.read_until(6)
    now = tables.positions(topic)[1]
    reading = make_consumer(settings, GROUP)
    found = wait_until(
        lambda: one if (one := reading.committed([TopicPartition(topic, 1)], 10)[0]).offset == 6 else None
    )
    reading.close()
    assert found.metadata == now.topic_id
    owner.reader.close()
    with tables.database.transaction() as connection:
        offsets.advance(connection, tables.offsets, now, Position(topic, 1, now.topic_id, 2))
    owners.append(restored := Owner(settings, tables, topic))
    assert restored.read_until(4) == values(4, 2)
    assert [opening.partition for opening in restored.openings if opening.went_back] == [1]


def test_a_message_of_10_mb_is_given(settings: KafkaSettings, tables: Tables, owners: list[Owner]) -> None:
    """B7: larger than every fetch size; the partition goes on behind it."""
    create(make_admin(settings), settings.accounts_topic, 1, **{"max.message.bytes": "20000000"})
    producer = Producer({**producer_config(settings), "message.max.bytes": 20_000_000})
    for body in (b"before", b"x" * 10_000_000, b"after"):
        producer.produce(settings.accounts_topic, body, key=b"k")
    assert producer.flush(20) == 0
    owners.append(owner := Owner(settings, tables, settings.accounts_topic))
    owner.read_until(3)
    assert [len(value) for value in owner.seen] == [6, 10_000_000, 5]


def test_a_missing_topic_is_said_and_waited_for(
    settings: KafkaSettings, tables: Tables, owners: list[Owner], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    owners.append(owner := Owner(settings, tables, settings.accounts_topic))
    relay = Relay(tables.database, tables.outbox, settings.model_copy(update={"kafka_publish_deadline_ms": 1_000}))
    with tables.database.transaction() as connection:
        outbox.stage(connection, tables.outbox, [Staged(settings.accounts_topic, "k", b"v", "report")])
    wait_until(
        lambda: relay.step() != 0 and owner.step() is not None and sum("apply" in m for m in caplog.messages) >= 2
    )
    create(make_admin(settings), settings.accounts_topic)
    wait_until(lambda: relay.step() != 0 and owner.step() is not None and owner.seen == ["v"], 40)
    relay.close()


def test_a_woken_relay_and_a_waiting_reader_need_no_poll(
    settings: KafkaSettings, topic: str, tables: Tables, owners: list[Owner]
) -> None:
    """A message takes milliseconds (printed), whatever the poll times are."""
    owners.append(owner := Owner(settings, tables, topic))
    owner.join(2)
    relay = Relay(tables.database, tables.outbox, settings)
    loop = Loop("relay", relay.step, pause_min_s=0.005, pause_max_s=60)
    loop.start()
    took = []
    try:
        for number in range(40):
            time.sleep(0.02)
            began = time.monotonic()
            with tables.database.transaction() as connection:
                outbox.stage(connection, tables.outbox, [Staged(topic, f"k{number}", str(number).encode(), "report")])
            loop.wake()
            with within(20, "the message, though the relay polls every 60 s and the reader waits as long"):
                while len(owner.seen) <= number:
                    owner.step(timeout_s=60)
            took.append(time.monotonic() - began)
    finally:
        loop.stop()
        assert loop.join(10)
        relay.close()
    took.sort()
    print(f"commit to reader: p50 {took[20] * 1000:.1f} ms, p90 {took[36] * 1000:.1f} ms")


def test_a_killed_broker_costs_nothing(own_kafka: KafkaBroker, tables: Tables, owners: list[Owner]) -> None:
    """B5, B2: rows stay in the outbox, coalesced, and go out when it is back; the reader goes on by itself."""
    settings = kafka_settings(own_kafka.bootstrap_servers, kafka_publish_deadline_ms=1_000)
    topic = settings.accounts_topic
    create(make_admin(settings), topic)
    owners.append(owner := Owner(settings, tables, topic))
    relay = Relay(tables.database, tables.outbox, settings, retry_max_ms=500)
    stop = threading.Event()

    def report(body: int) -> None:
        with tables.database.transaction() as connection:
            staged = [Staged(topic, f"k{number}", f"{number}:{body}".encode(), "report") for number in range(20)]
            outbox.stage(connection, tables.outbox, staged)

    def seen(body: int) -> bool:
        relay.step()
        owner.step()
        return {f"{number}:{body}" for number in range(20)} <= set(owner.seen)

    report(0)
    wait_until(lambda: seen(0), 60)
    own_kafka.kill()
    for body in range(1, 30):
        report(body)
        relay.step()
        owner.step(timeout_s=0.01)
    with tables.database.reading() as connection:
        assert outbox.depth(connection, tables.outbox)[0] == 20
    own_kafka.start()
    wait_until(lambda: seen(29), 60)
    stop.set()
    with tables.database.reading() as connection:
        wait_until(lambda: relay.step() != 0 and outbox.depth(connection, tables.outbox)[0] == 0)
    relay.close()


def test_a_reader_that_ends_without_a_broker_leaves_nothing_behind_when_it_is_back(
    own_kafka: KafkaBroker,
    tables: Tables,
    owners: list[Owner],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """librdkafka's close waits for an offset's commit that nobody answers (its issue 3740)."""
    settings = kafka_settings(own_kafka.bootstrap_servers, kafka_session_timeout_ms=2_000)
    topic = settings.accounts_topic
    create(make_admin(settings), topic)
    left = Owner(settings, tables, topic)
    left.join(2)
    publish(settings, topic, values(3), partition=0)
    (batch,) = wait_until(lambda: left.reader.read(0.1, 100) or None)
    own_kafka.kill()
    assert left.apply(batch)
    left.reader.commit([batch])
    with monkeypatch.context() as patch:
        patch.setattr(consumer_module, "CLOSE_S", 0.3)
        left.reader.close()
    assert "left behind" in caplog.text
    own_kafka.start()
    owners.append(owner := Owner(settings, tables, topic))
    owner.join(2)
    publish(settings, topic, values(3, 3), partition=0)
    assert owner.read_until(3) == values(3, 3)
    wait_until(lambda: all(thread.name != "consumer-close" for thread in threading.enumerate()), 90)
    assert owner.closed == []
