"""The reader of replies: each batch in the transaction that moves its offset, on the mock cluster."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from confluent_kafka import Producer
from pydantic import SecretStr
from sqlalchemy import Connection, select, update

from celery_durable.dispatcher.replies import ReplyReader, group_id
from celery_durable.kafka.client import producer_config
from celery_durable.permits.messages import AccountReply
from celery_durable.runtime import Runtime
from celery_durable.settings import Settings
from celery_durable.store.accounts import client_identity
from celery_durable.store.database import Database
from celery_durable.store.schema import build_tables
from tests.harness import wait_until
from tests.kafka_parts import kafka_settings
from tests.mock_cluster import MockCluster

CLIENT = "billing"


class Sink:
    """Keeps the newest reply of each account, as the dispatcher's passes do, and can be made to fail."""

    def __init__(self) -> None:
        self.newest: dict[str, AccountReply] = {}
        self.restorations = 0
        self.committed = 0
        self.fail: Exception | None = None

    def apply_replies(
        self, connection: Connection, replies: Sequence[AccountReply], *, one_by_one: bool
    ) -> Callable[[], None]:
        if self.fail is not None:
            raise self.fail
        for reply in replies:
            known = self.newest.get(reply.account)
            if known is None or known.version <= reply.version:
                self.newest[reply.account] = reply

        def after_commit() -> None:
            self.committed += 1

        return after_commit

    def restored(self, connection: Connection) -> None:
        self.restorations += 1


@pytest.fixture
def cluster() -> Iterator[MockCluster]:
    with MockCluster() as cluster:
        yield cluster


def make_runtime(cluster: MockCluster, url: str) -> Runtime:
    kafka = kafka_settings(cluster.bootstrap_servers).model_dump()
    settings = Settings(client_id=CLIENT, database_url=SecretStr(url), **kafka)
    runtime = Runtime(settings, Database(url), build_tables())
    runtime.tables.metadata.create_all(runtime.database.engine)
    return runtime


@pytest.fixture
def runtime(cluster: MockCluster, sqlite_url: str) -> Iterator[Runtime]:
    runtime = make_runtime(cluster, sqlite_url)
    yield runtime
    runtime.database.dispose()


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def reader(runtime: Runtime, sink: Sink) -> Iterator[ReplyReader]:
    reader = ReplyReader(runtime, sink)
    yield reader
    reader.close()


def reply(account: str, version: int, client_id: str = CLIENT) -> AccountReply:
    return AccountReply(client_id=client_id, incarnation="i", account=account, epoch=1, version=version, answers=0)


def send(runtime: Runtime, *messages: tuple[str, bytes]) -> None:
    producer = Producer({**producer_config(runtime.settings), "message.max.bytes": 20_000_000})
    for key, body in messages:
        producer.produce(runtime.settings.replies_topic(CLIENT), body, key=key.encode())
        producer.poll(0)
    assert producer.flush(20) == 0


def send_replies(runtime: Runtime, *replies: AccountReply) -> None:
    send(runtime, *((one.account, one.to_bytes()) for one in replies))


def dead(runtime: Runtime) -> list[dict[str, str]]:
    outbox = runtime.tables.outbox
    with runtime.database.reading() as connection:
        rows = connection.execute(
            select(outbox.c.headers).where(outbox.c.topic == runtime.settings.dead_letters_topic).order_by(outbox.c.no)
        )
        return [row.headers for row in rows]


def offsets_sum(runtime: Runtime) -> int:
    with runtime.database.reading() as connection:
        return sum(connection.execute(select(runtime.tables.offsets.c.next_offset)).scalars())


def read_all(reader: ReplyReader, runtime: Runtime, count: int) -> None:
    wait_until(lambda: reader.step() is None and offsets_sum(runtime) >= count, what=f"{count} messages read")


def test_applies_replies(reader: ReplyReader, runtime: Runtime, sink: Sink) -> None:
    send_replies(runtime, *(reply(f"a{number}", 1) for number in range(20)), reply("a0", 2))
    read_all(reader, runtime, 21)
    assert {account: one.version for account, one in sink.newest.items()} == {
        **{f"a{number}": 1 for number in range(20)},
        "a0": 2,
    }
    assert sink.committed >= 1
    assert not sink.restorations


def test_malformed_messages_go_to_the_dead_letters_and_the_partition_goes_on(
    reader: ReplyReader, runtime: Runtime, sink: Sink
) -> None:
    """B7: malformed JSON, wrong type, unknown `v`, 4 MB (the mock cluster keeps no more), no body, another client's."""
    good = reply("acme", 1).to_bytes()
    bad = [
        b"{",
        b"[]",
        good.replace(b'"v":1', b'"v":2'),
        good.replace(b'"version":1', b'"version":"one"'),
        b"x" * 4_000_000,
        b"",
        reply("acme", 1, client_id="other").to_bytes(),
    ]
    send(runtime, *(("acme", body) for body in bad), ("acme", good))
    read_all(reader, runtime, len(bad) + 1)
    assert sink.newest["acme"].version == 1
    letters = dead(runtime)
    assert [letter["offset"] for letter in letters] == [str(number) for number in range(len(bad))]
    assert all(letter["reason"] and letter["topic"] == runtime.settings.replies_topic(CLIENT) for letter in letters)
    assert letters[2]["reason"].startswith("v: ")
    assert letters[4]["truncated_from_bytes"] == "4000000"
    assert "'other'" in letters[6]["reason"]


def test_unknown_fields_are_ignored(reader: ReplyReader, runtime: Runtime, sink: Sink) -> None:
    send(runtime, ("acme", reply("acme", 1).to_bytes()[:-1] + b',"newer":{"x":[1]}}'))
    read_all(reader, runtime, 1)
    assert sink.newest["acme"].version == 1


def test_a_failed_transaction_is_read_again(reader: ReplyReader, runtime: Runtime, sink: Sink) -> None:
    """B1: neither the offset nor a dead letter stays of it."""
    send(runtime, ("acme", reply("acme", 1).to_bytes()), ("acme", b"{"))
    sink.fail = ConnectionError("the database is away")

    def failed() -> bool:
        try:
            reader.step()
        except ConnectionError:
            return True
        return False

    for _ in range(2):
        wait_until(failed)
    assert offsets_sum(runtime) == 0
    assert dead(runtime) == []
    sink.fail = None
    read_all(reader, runtime, 2)
    assert sink.newest["acme"].version == 1
    assert len(dead(runtime)) == 1


@pytest.mark.parametrize("seed", range(3))
def test_duplicated_reordered_and_skipped_replies_end_alike(
    reader: ReplyReader, runtime: Runtime, sink: Sink, seed: int
) -> None:
    """B4."""
    chance = random.Random(seed)
    replies = [reply("acme", version) for version in range(1, 11)]
    sent = [*chance.choices(replies[:-1], k=12), replies[-1]]
    chance.shuffle(sent)
    send_replies(runtime, *sent)
    read_all(reader, runtime, len(sent))
    assert sink.newest["acme"] == replies[-1]


def test_two_dispatchers_share_the_partitions(reader: ReplyReader, runtime: Runtime, sink: Sink) -> None:
    """B11: each reply is applied, whoever reads it."""
    other_sink = Sink()
    other = ReplyReader(runtime, other_sink)
    try:
        send_replies(runtime, *(reply(f"a{number}", 1) for number in range(10)))
        wait_until(lambda: (reader.step(), other.step(), offsets_sum(runtime) >= 10)[2])
        send_replies(runtime, *(reply(f"b{number}", 1) for number in range(10)))
        wait_until(lambda: (reader.step(), other.step(), offsets_sum(runtime) >= 20)[2])
        assert set(sink.newest) | set(other_sink.newest) == {f"{name}{number}" for name in "ab" for number in range(10)}
    finally:
        other.close()


def committed_sum(runtime: Runtime) -> int:
    from confluent_kafka import TopicPartition

    from celery_durable.kafka.client import make_consumer

    with runtime.database.transaction() as connection:
        identity = client_identity(connection, runtime.tables, CLIENT)
    consumer = make_consumer(runtime.settings, group_id(*identity))
    try:
        topic = runtime.settings.replies_topic(CLIENT)
        found = consumer.committed([TopicPartition(topic, number) for number in range(4)], 10)
        return sum(max(0, one.offset) for one in found)
    finally:
        consumer.close()


def test_a_restored_database_is_noticed_before_anything_is_admitted(
    reader: ReplyReader, runtime: Runtime, sink: Sink
) -> None:
    """A19: by the dispatcher at its start, without joining the group, and again when it is given partitions."""
    assert reader.check_restored()
    send_replies(runtime, *(reply("acme", version) for version in range(1, 6)))
    read_all(reader, runtime, 5)
    wait_until(lambda: committed_sum(runtime) == 5)
    assert reader.check_restored()
    assert not sink.restorations
    reader.close()
    offsets = runtime.tables.offsets
    with runtime.database.transaction() as connection:
        connection.execute(update(offsets).where(offsets.c.next_offset == 5).values(next_offset=3))
    restarted_sink = Sink()
    restarted = ReplyReader(runtime, restarted_sink)
    try:
        assert restarted.check_restored()
        assert restarted_sink.restorations == 1
        read_all(restarted, runtime, 5)
        assert restarted_sink.restorations == 2
        assert restarted.check_restored()
        assert restarted_sink.restorations == 2
    finally:
        restarted.close()


def test_a_second_database_under_the_same_name_takes_no_reply_away(
    reader: ReplyReader, runtime: Runtime, sink: Sink, cluster: MockCluster, tmp_path: Path
) -> None:
    """A35: it reads them all, as the first does, and neither is taken for a restored one."""
    second, second_sink = make_runtime(cluster, f"sqlite:///{tmp_path / 'second.sqlite3'}"), Sink()
    other = ReplyReader(second, second_sink)
    try:
        for number in range(1, 3):
            names = [f"a{number}-{each}" for each in range(20)]
            send_replies(runtime, *(reply(name, 1) for name in names))
            wait_until(lambda: (other.step(), offsets_sum(second) >= 20 * number)[1])  # noqa: B023
            read_all(reader, runtime, 20 * number)
            assert set(names) <= set(sink.newest) & set(second_sink.newest)
        assert reader.check_restored()
        assert other.check_restored()
        assert sink.restorations == second_sink.restorations == 0
    finally:
        other.close()
        second.database.dispose()


def test_kafka_away_leaves_it_unknown(runtime: Runtime, sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery_durable.kafka.client.ANSWER_S", 0.5)
    settings = runtime.settings.model_copy(update={"kafka_bootstrap_servers": "127.0.0.1:23097"})
    away = Runtime(settings, runtime.database, runtime.tables)
    assert not ReplyReader(away, sink).check_restored()
    assert not sink.restorations
