"""What users have running goes on when the Celery broker forgets everything, and when Kafka is away."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from celery_durable.runtime import runtime_of
from tests.example.records import most_at_once
from tests.harness import Kafka, Service, Stack, wait_until
from tests.services import KafkaBroker, Redis

pytestmark = [pytest.mark.processes, pytest.mark.postgresql]


def rows(service: Service, table: str, *columns: str) -> list[tuple[Any, ...]]:
    """The columns of every row of a table."""
    runtime = runtime_of(service.app)
    found = getattr(runtime.tables, table)
    with runtime.database.reading() as connection:
        return [tuple(row) for row in connection.execute(select(*(found.c[name] for name in columns)))]


def count(service: Service, state: str) -> int:
    """How many operations are in the state."""
    runtime = runtime_of(service.app)
    operations = runtime.tables.operations
    with runtime.database.reading() as connection:
        return int(connection.scalar(select(func.count()).where(operations.c.state == state)) or 0)


@pytest.fixture
def on_own_redis(tmp_path: Path, mock_kafka: Kafka, postgresql_server: str, own_redis: Redis) -> Iterator[Stack]:
    """A stack whose Celery broker the test may wipe."""
    redis = (own_redis.url().rpartition("/")[0], itertools.count(1))
    with Stack(tmp_path, kafka=mock_kafka, postgresql=postgresql_server, redis=redis) as stack:
        yield stack


@pytest.fixture
def on_own_kafka(tmp_path: Path, own_kafka: KafkaBroker, postgresql_server: str) -> Iterator[Stack]:
    """A stack whose Kafka the test may kill."""
    kafka = Kafka(own_kafka.bootstrap_servers, own_kafka.kind, Kafka.new_prefix())
    with Stack(tmp_path, kafka=kafka, postgresql=postgresql_server) as stack:
        yield stack


@pytest.mark.redis
def test_a_wiped_celery_broker_loses_nothing(on_own_redis: Stack, own_redis: Redis) -> None:
    """Case C4: Redis flushed, and killed and started again: everything still runs, once each."""
    service = on_own_redis.service(resend_min_s=1.0)
    on_own_redis.holder()
    service.dispatcher()
    plain, limited = service.task("add"), service.task("work")

    def enqueue() -> None:
        for number in range(20):
            plain.delay(number, 1)
            limited.delay(f"tenant:{number % 4}", 0.02)

    enqueue()
    wait_until(lambda: count(service, "admitted") >= 20 + 4, 60, what="20 sent, and one of each account")
    with own_redis.client(1) as client:
        wait_until(lambda: client.llen("celery") >= 20, 30, what="messages in Redis")
    own_redis.flush()
    service.worker(concurrency=4)
    wait_until(lambda: count(service, "succeeded") == 40, 90, what="all succeeded")

    own_redis.restart()
    enqueue()
    own_redis.restart()
    wait_until(lambda: count(service, "succeeded") == 80, 120, what="all succeeded after a restart")
    runs = Counter(record.operation_id for record in service.records() if record.event == "start")
    assert (len(runs), set(runs.values())) == (80, {1})
    assert max(most_at_once([each for each in service.records() if each.account]).values()) <= 2


@pytest.mark.kafka
def test_work_goes_on_while_kafka_is_away(on_own_kafka: Stack, own_kafka: KafkaBroker) -> None:
    """Case B5: enqueue, leased work and settle go on; afterwards there is one report an account, not thousands."""
    service = on_own_kafka.service(idle_return_s=300.0)
    on_own_kafka.holder()
    service.dispatcher()
    service.worker(concurrency=4)
    plain, limited = service.task("add"), service.task("work")
    warm = [limited.delay("tenant:warm") for _ in range(4)]
    wait_until(lambda: count(service, "succeeded") == 4, 60, what=f"{len(warm)} operations that warm a lease")

    own_kafka.kill()
    for number in range(30):
        plain.delay(number, 1)
        limited.delay("tenant:warm")
        limited.delay("tenant:cold")
    wait_until(lambda: count(service, "succeeded") == 4 + 60, 90, what="work without and within a lease")
    assert count(service, "queued") == 30
    staged = Counter(key for (key,) in rows(service, "outbox", "key"))
    assert staged["tenant:cold"] == 1
    assert max(staged.values()) == 1

    own_kafka.start()
    wait_until(lambda: count(service, "succeeded") == 4 + 90, 120, what="what waited for Kafka")
    assert max(most_at_once([each for each in service.records() if each.account]).values()) <= 2
    wait_until(lambda: not rows(service, "outbox", "key"), 60, what="an empty outbox")
