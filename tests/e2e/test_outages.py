"""What users have running goes on when the Celery broker forgets everything, and when Kafka is away."""

from __future__ import annotations

import itertools
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.observe import History, operation, reports, rows, states, wait_ended
from tests.example.records import most_at_once
from tests.harness import Kafka, Service, Stack, wait_until, within
from tests.services import KafkaBroker, RabbitMQ, Redis
from tests.services.kafka import ApacheKafka

pytestmark = [pytest.mark.processes, pytest.mark.postgresql]


def count(service: Service, state: str) -> int:
    """How many operations are in the state."""
    return states(service)[state]


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


def test_a_purged_and_restarted_rabbitmq_loses_nothing(
    tmp_path: Path, mock_kafka: Kafka, postgresql_server: str, own_rabbitmq: RabbitMQ
) -> None:
    """Case C4: RabbitMQ's queue purged, the broker killed and started again: everything still runs, once each."""
    with Stack(tmp_path, kafka=mock_kafka, postgresql=postgresql_server) as stack:
        service = stack.service(resend_min_s=1.0)
        vhost = own_rabbitmq.new_vhost()
        service.broker |= {"broker_url": vhost, "worker_enable_remote_control": False}
        stack.holder()
        service.dispatcher()
        plain, limited = service.task("add"), service.task("work")

        def enqueue() -> None:
            for number in range(15):
                plain.delay(number, 1)
                limited.delay(f"tenant:{number % 3}", 0.02)

        enqueue()
        name = vhost.rpartition("/")[2]

        def queued() -> int:
            listed = own_rabbitmq.control("-p", name, "list_queues", "name", "messages")
            sizes = dict(line.split("\t") for line in listed.splitlines())
            return int(sizes.get("celery", 0))

        wait_until(lambda: queued() >= 15 + 6, 60, what="all that may run is in RabbitMQ")
        own_rabbitmq.control("-p", name, "purge_queue", "celery")
        worker = service.worker(concurrency=4)
        wait_until(lambda: count(service, "succeeded") == 30, 90, what="all succeeded")
        enqueue()
        own_rabbitmq.restart()
        wait_until(lambda: count(service, "succeeded") == 60, 120, what="all succeeded after a restart")
        assert worker.alive
        assert set(History([service]).starts().values()) == {1}
        History([service]).check_bound(2)


def test_a_worker_with_threads_takes_messages_again_after_rabbitmq_was_killed(
    tmp_path: Path, mock_kafka: Kafka, postgresql_server: str, own_rabbitmq: RabbitMQ
) -> None:
    """Case C4: also where it ran something when its connection was lost, which reduces Celery's prefetch count."""
    with Stack(tmp_path, kafka=mock_kafka, postgresql=postgresql_server) as stack:
        service = stack.service(resend_min_s=1.0)
        service.broker |= {"broker_url": own_rabbitmq.new_vhost(), "worker_enable_remote_control": False}
        service.broker |= {"worker_prefetch_multiplier": 1}
        stack.holder()
        service.dispatcher()
        service.worker(concurrency=8, pool="threads")
        for number in range(6):
            service.task("work").delay(f"tenant:{number}", 3.0)
        wait_until(lambda: count(service, "running") == 6, 60, what="six that run")
        own_rabbitmq.kill()
        for number in range(100):
            service.task("add").delay(number, 1)
        own_rabbitmq.start()
        wait_until(lambda: count(service, "succeeded") == 106, 60, what="all succeeded after a restart")


@pytest.mark.redis
def test_enqueue_needs_neither_broker_nor_result_backend(on_own_redis: Stack, own_redis: Redis) -> None:
    """Cases C19 and C24: both unreachable: ``delay`` returns, the row is committed, and it runs when they are back."""
    service = on_own_redis.service(resend_min_s=1.0)
    service.broker["result_backend"] = own_redis.url(9)
    on_own_redis.holder()
    service.dispatcher()
    worker = service.worker()
    own_redis.kill()
    with within(30, "ten calls, though Celery would try each of them for a while"):
        results = [service.task("add").delay(number, 1) for number in range(5)]
        results += [service.task("work").delay("tenant:acme") for _ in range(5)]
    assert sum(states(service).values()) == 10
    assert not states(service)["succeeded"]
    wait_until(lambda: count(service, "admitted") >= 7, 60, what="permits are given without the broker")
    assert not History([service]).starts()
    own_redis.start()
    wait_until(lambda: count(service, "succeeded") == 10, 120, what="all succeeded")
    assert [result.get(timeout=5) for result in results] == [1, 2, 3, 4, 5, *["tenant:acme"] * 5]
    assert set(History([service]).starts().values()) == {1}
    assert worker.alive
    with own_redis.client(9) as client:
        wait_until(lambda: client.dbsize() == 10, 30, what="the app's own backend has the results too")


@pytest.mark.redis
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_worker_takes_messages_again_after_all_its_acknowledgements_failed(
    on_own_redis: Stack, own_redis: Redis, tmp_path: Path, pool: str
) -> None:
    """Case C4: Redis is away as a worker begins all that it has taken. Celery alone would be deaf from then on."""
    service = on_own_redis.service(resend_min_s=1.0)
    # With a connection for remote control, or events, it would notice by that one that Redis was away.
    service.broker |= {"worker_prefetch_multiplier": 1, "worker_enable_remote_control": False}
    on_own_redis.holder()
    service.dispatcher()
    worker = service.worker(pool=pool, extra=["--without-heartbeat"])
    flag = tmp_path / "go on"
    for number in range(6):
        service.task("until").delay(f"tenant:{number}", str(flag))
    wait_until(lambda: count(service, "running") == 2, 60, what="two have begun")
    with own_redis.client(1) as client:
        # Celery acknowledges as a body begins: the worker has two more, which may not begin yet.
        wait_until(lambda: client.llen("celery") == 2, 30, what="the worker has taken all that it may")
    own_redis.kill()
    flag.touch()
    wait_until(lambda: "ConnectionError" in worker.log_tail(200), 30, what="the acknowledgements have failed")
    own_redis.start()
    wait_until(lambda: count(service, "succeeded") == 6, 60, what="the worker takes messages again")


@pytest.mark.kafka
def test_a_newer_report_survives_the_acknowledgement_of_an_older(on_own_kafka: Stack, own_kafka: KafkaBroker) -> None:
    """Case B3: what was staged while Kafka had the older report in hand is still sent."""
    service, account = on_own_kafka.service(), "tenant:newer"
    service.dispatcher()
    service.worker()
    service.task("work").delay("tenant:first")
    wait_until(lambda: reports(service, "tenant:first"), 60, what="the relay works")
    pause(own_kafka)
    try:
        first = service.task("work").delay(account)
        # Claimed by the relay: not due before its publish deadline is over.
        wait_until(lambda: claimed(service, account), 30, what="the first report is on its way")
        (before,) = rows(service, "outbox", "no", "version", key=account)
        more = [service.task("work").delay(account) for _ in range(5)]
        wait_until(lambda: rows(service, "outbox", "version", key=account) > [before[1:]], 30, what="a newer report")
    finally:
        pause(own_kafka, signal.SIGCONT)
    wait_until(lambda: not rows(service, "outbox", "no", key=account), 60, what="both are sent")
    sent = reports(service, account)
    assert sent[0]["groups"][0]["waiting"] == 1
    assert sent[-1]["groups"][0]["waiting"] == 6
    on_own_kafka.holder()
    wait_ended(service, account, 6)
    assert operation(service, first.id).attempt == 1
    assert set(History([service]).starts(account).values()) == {1}
    assert len(more) == 5


def pause(broker: KafkaBroker, number: signal.Signals = signal.SIGSTOP) -> None:
    """Stops Kafka's process, or continues it: messages on their way are not lost, and not acknowledged either."""
    assert isinstance(broker, ApacheKafka)
    broker.signal(number)


def claimed(service: Service, key: str) -> bool:
    """Whether a relay has taken the row to send it."""
    return any(due - staged > 5_000 for due, staged in rows(service, "outbox", "due_at", "staged_at", key=key))


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
