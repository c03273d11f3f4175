"""The relay on the mock cluster: at least once, one key's error is its own, and only the delivery report is true."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from sqlalchemy import update

from celery_durable.kafka.received import Received, read_to_end
from celery_durable.kafka.relay import Relay
from celery_durable.kafka.settings import KafkaSettings
from celery_durable.scheduling.loop import Loop
from celery_durable.store import outbox
from celery_durable.store.clock import now_ms
from celery_durable.store.outbox import Staged
from tests.harness import wait_until, within
from tests.kafka_parts import Tables, kafka_settings, partition_of, tables_in
from tests.mock_cluster import MockCluster, Request

TOPIC = "accounts"


@pytest.fixture
def cluster() -> Iterator[MockCluster]:
    with MockCluster(brokers=2) as cluster:
        cluster.create_topic(TOPIC, 4)
        yield cluster


@pytest.fixture
def settings(cluster: MockCluster) -> KafkaSettings:
    return kafka_settings(cluster.bootstrap_servers, kafka_publish_deadline_ms=1_000)


@pytest.fixture
def tables(sqlite_url: str) -> Iterator[Tables]:
    with tables_in(sqlite_url) as tables:
        yield tables


@pytest.fixture
def both(database_url: str) -> Iterator[Tables]:
    """On SQLite and on PostgreSQL, where two transactions run at once."""
    with tables_in(database_url) as tables:
        yield tables


@pytest.fixture
def relay(tables: Tables, settings: KafkaSettings) -> Iterator[Relay]:
    relay = Relay(tables.database, tables.outbox, settings, retry_min_ms=10, retry_max_ms=50)
    yield relay
    relay.close()


def stage(tables: Tables, *keys: str, body: bytes = b"1", topic: str = TOPIC, slot: str | None = "report") -> None:
    with tables.database.transaction() as connection:
        outbox.stage(connection, tables.outbox, [Staged(topic, key, body, slot) for key in keys])


def waiting(tables: Tables) -> int:
    with tables.database.reading() as connection:
        return outbox.depth(connection, tables.outbox)[0]


def drain(relay: Relay, tables: Tables, left: int = 0, deadline_s: float = 20) -> None:
    def done() -> bool:
        relay.step()
        return waiting(tables) <= left

    wait_until(done, deadline_s, what=f"{left} rows left")


def received(settings: KafkaSettings, topic: str = TOPIC) -> list[Received]:
    return list(read_to_end(settings, topic))


def keys(messages: list[Received]) -> list[str]:
    return sorted((message.key or b"").decode() for message in messages)


def test_sends_and_deletes(relay: Relay, tables: Tables, settings: KafkaSettings) -> None:
    names = [f"k{number}" for number in range(50)]
    with tables.database.transaction() as connection:
        staged = [Staged(TOPIC, name, b"body", "report", {"reason": "näher"}) for name in names]
        outbox.stage(connection, tables.outbox, staged)
    drain(relay, tables)
    messages = received(settings)
    assert keys(messages) == sorted(names)
    assert {message.value for message in messages} == {b"body"}
    assert {message.headers for message in messages} == {(("reason", "näher".encode()),)}
    assert relay.step() == float("inf")


def test_lands_where_java_clients_would_put_it(relay: Relay, tables: Tables, settings: KafkaSettings) -> None:
    names = [f"tenant:{number}" for number in range(30)]
    stage(tables, *names)
    drain(relay, tables)
    for message in received(settings):
        assert message.partition == partition_of((message.key or b"").decode(), 4)


def test_a_row_is_sent_at_a_wake(relay: Relay, tables: Tables, settings: KafkaSettings) -> None:
    stage(tables, "warm-up")
    drain(relay, tables)
    loop = Loop("relay", relay.step, pause_min_s=0.005, pause_max_s=60)
    loop.start()
    try:
        for number in range(10):
            stage(tables, f"k{number}")
            loop.wake()
            wait_until(lambda: waiting(tables) == 0, 20, what="the row to be sent, though the relay polls every 60 s")
    finally:
        loop.stop()
        assert loop.join(10)


def test_a_newer_row_survives_the_report_of_the_older(
    relay: Relay, tables: Tables, settings: KafkaSettings, cluster: MockCluster
) -> None:
    """B3: replaced while it is on its way."""
    stage(tables, "a", body=b"warm-up")
    drain(relay, tables)
    stage(tables, "a", body=b"old")
    for broker in (1, 2):
        cluster.slow(broker, 300)
    relay.step()
    stage(tables, "a", body=b"new")
    for broker in (1, 2):
        cluster.slow(broker, 0)
    drain(relay, tables)
    assert [message.value for message in received(settings)] == [b"warm-up", b"old", b"new"]


def test_a_crash_before_the_delete_sends_again(
    relay: Relay, tables: Tables, settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B2: acknowledged, not deleted; after the hold another relay sends the row again."""

    class Crash(Exception):
        pass

    def crash(_connection: object, _outbox: object, sent: list[object]) -> int:
        if sent:
            raise Crash
        return 0  # on a busy machine Kafka may be told twice

    stage(tables, "a")
    with monkeypatch.context() as patch:
        patch.setattr(outbox, "delivered", crash)

        def crashed() -> bool:
            try:
                relay.step()
            except Crash:
                return True
            return False

        wait_until(crashed)
    assert waiting(tables) == 1
    with tables.database.transaction() as connection:
        connection.execute(update(tables.outbox).values(due_at=now_ms()))
    successor = Relay(tables.database, tables.outbox, settings)
    try:
        drain(successor, tables)
    finally:
        successor.close()
    assert keys(received(settings)) == ["a", "a"]


def test_what_was_acknowledged_is_deleted_although_the_database_was_away(
    relay: Relay, tables: Tables, settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(tables, "a")
    delivered, failures = outbox.delivered, 2

    def flaky(*arguments: Any) -> int:
        nonlocal failures
        if failures:
            failures -= 1
            raise ConnectionError("the database is away")
        return delivered(*arguments)

    monkeypatch.setattr(outbox, "delivered", flaky)

    def gone() -> bool:
        try:
            relay.step()
        except ConnectionError:
            return False
        return waiting(tables) == 0

    wait_until(gone)
    assert keys(received(settings)) == ["a"]


def test_an_error_holds_back_its_own_key_only(tables: Tables, settings: KafkaSettings, cluster: MockCluster) -> None:
    """B6: one partition's broker is down; keys of the others do not wait for it, its own go through when it is back."""
    patient = settings.model_copy(update={"kafka_publish_deadline_ms": 60_000})
    relay = Relay(tables.database, tables.outbox, patient, retry_min_ms=10, retry_max_ms=50)
    for partition in range(4):
        cluster.lead(TOPIC, partition, 2 if partition == 3 else 1)
    names = [f"k{number}" for number in range(40)]
    stuck = [name for name in names if partition_of(name, 4) == 3]
    assert stuck
    stage(tables, "warm-up")
    drain(relay, tables)
    cluster.down(2)
    stage(tables, *names)
    drain(relay, tables, left=len(stuck))
    later = [f"l{number}" for number in range(10) if partition_of(f"l{number}", 4) != 3]
    stage(tables, *later)
    drain(relay, tables, left=len(stuck))
    assert waiting(tables) == len(stuck)
    cluster.up(2)
    drain(relay, tables)
    relay.close()
    assert set(keys(received(settings))) == {"warm-up", *names, *later}


def test_a_message_that_kafka_refuses_fails_alone(
    relay: Relay, tables: Tables, settings: KafkaSettings, caplog: pytest.LogCaptureFixture
) -> None:
    """B6, B13: too large for the producer."""
    stage(tables, "big", body=b"x" * 2_000_000)
    stage(tables, *(f"k{number}" for number in range(20)))
    with caplog.at_level(logging.INFO):
        drain(relay, tables, left=1)
        for _ in range(10):
            relay.step()
    assert keys(received(settings)) == sorted(f"k{number}" for number in range(20))
    said = [record.levelname for record in caplog.records if "'big'" in record.getMessage()]
    assert said in (["INFO"], ["INFO", "WARNING"])  # once, and once more if it lasts


def test_a_broker_error_is_tried_again(
    relay: Relay, tables: Tables, settings: KafkaSettings, cluster: MockCluster
) -> None:
    cluster.fail(Request.PRODUCE, [KafkaError.TOPIC_AUTHORIZATION_FAILED])
    stage(tables, "a")
    drain(relay, tables)
    assert keys(received(settings)) == ["a"]


def test_an_outage_costs_the_deadline_and_nothing_is_lost(
    relay: Relay, tables: Tables, settings: KafkaSettings, cluster: MockCluster
) -> None:
    """B5: reports that are staged meanwhile replace each other."""
    stage(tables, "warm-up")
    drain(relay, tables)
    cluster.down(1)
    cluster.down(2)
    began, body = time.monotonic(), 0
    while time.monotonic() - began < 2 * settings.kafka_publish_deadline_ms / 1000:
        body += 1
        stage(tables, "a", "b", body=str(body).encode())
        with within(20, "a step of the relay"):
            relay.step()
    assert waiting(tables) == 2
    cluster.up(1)
    cluster.up(2)
    drain(relay, tables)
    newest = {message.key: message.value for message in received(settings)}
    assert newest[b"a"] == newest[b"b"] == str(body).encode()


def test_a_fatal_error_leads_to_a_new_producer(
    relay: Relay, tables: Tables, settings: KafkaSettings, cluster: MockCluster
) -> None:
    """An idempotent producer that lost its sequence says so once and is useless from then on."""
    stage(tables, "warm-up")
    drain(relay, tables)
    before = relay._producer
    cluster.fail(Request.PRODUCE, [KafkaError.UNKNOWN_PRODUCER_ID, KafkaError.INVALID_PRODUCER_EPOCH])
    cluster.fail(Request.PRODUCE, [KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER] * 3)
    stage(tables, *(f"k{number}" for number in range(10)))
    drain(relay, tables)
    assert relay._producer is not before
    assert set(keys(received(settings))) == {"warm-up", *(f"k{number}" for number in range(10))}


def test_a_full_queue_is_waited_for(tables: Tables, cluster: MockCluster) -> None:
    """`BufferError`: the rows that found no room are sent later."""
    settings = kafka_settings(cluster.bootstrap_servers, kafka_options={"queue.buffering.max.messages": 5})
    relay = Relay(tables.database, tables.outbox, settings, retry_min_ms=1, retry_max_ms=1)
    try:
        names = [f"k{number}" for number in range(60)]
        stage(tables, *names)
        drain(relay, tables)
        assert keys(received(settings)) == sorted(names)
    finally:
        relay.close()


def test_two_relays_share_the_rows(both: Tables, settings: KafkaSettings) -> None:
    """While reports are staged, each is sent, once or more, and the newest last."""
    relays = [Relay(both.database, both.outbox, settings, batch_max=7) for _ in range(2)]
    loops = [Loop("relay", relay.step, pause_min_s=0.001, pause_max_s=0.01) for relay in relays]
    for loop in loops:
        loop.start()
    try:
        names = [f"k{number}" for number in range(20)]
        for body in range(10):
            stage(both, *names, body=str(body).encode())
        stage(both, *names, body=b"event", slot=None)
        wait_until(lambda: waiting(both) == 0)
    finally:
        for loop in loops:
            loop.stop()
            assert loop.join(10)
        for relay in relays:
            relay.close()
    messages = received(settings)
    assert {message.key for message in messages if message.value == b"9"} == {name.encode() for name in names}
    assert keys([message for message in messages if message.value == b"event"]) == sorted(names)


def test_a_relay_names_when_the_next_row_is_due(relay: Relay, tables: Tables) -> None:
    stage(tables, "a")
    with tables.database.transaction() as connection:
        connection.execute(update(tables.outbox).values(due_at=now_ms() + 5_000))
    wait_s = relay.step()
    assert wait_s is not None
    assert 3 < wait_s <= 5


def test_a_closed_relay_keeps_what_was_not_acknowledged(
    relay: Relay, tables: Tables, settings: KafkaSettings, cluster: MockCluster
) -> None:
    cluster.down(1)
    cluster.down(2)
    stage(tables, "a")
    relay.step()
    relay.close()
    assert waiting(tables) == 1
    cluster.up(1)
    cluster.up(2)
    drain(relay, tables)
    assert keys(received(settings)) == ["a"]


def test_kafka_not_configured_is_said_clearly(tables: Tables) -> None:
    from celery_durable.errors import ConfigurationError

    with pytest.raises(ConfigurationError, match=r"kafka_bootstrap_servers = ''.*not configured"):
        Relay(tables.database, tables.outbox, KafkaSettings()).step()
    wrong = kafka_settings("127.0.0.1:23099", kafka_options={"no.such.setting": "secret"})
    with pytest.raises(ConfigurationError, match=r"no\.such\.setting") as found:
        Relay(tables.database, tables.outbox, wrong).step()
    assert "secret" not in str(found.value)
    assert not isinstance(found.value, KafkaException)
