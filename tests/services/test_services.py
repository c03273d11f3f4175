"""The services themselves: they start, keep their data over SIGKILL, and leave nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import psycopg
import pytest
import redis
from testcontainers.core.config import ConnectionMode, testcontainers_config
from testcontainers.core.container import Reaper

from tests.conftest import unavailable
from tests.harness import REPOSITORY, Kafka, wait_until
from tests.services import (
    KafkaBroker,
    PostgreSQL,
    RabbitMQ,
    Redis,
    ServerProcess,
    ServiceUnavailable,
    kafka,
    start_kafka,
)
from tests.services.docker_engine import RYUK_IMAGE, Engine, docker_engine
from tests.services.kafka import ADDRESS_VARIABLE, ApacheKafka, ContainerKafka, MockKafka
from tests.services.process import NotReady
from tests.services.shared import shared


def test_postgresql_keeps_commits_over_sigkill(own_postgresql: PostgreSQL) -> None:
    with own_postgresql.new_database() as url:
        plain = url.replace("+psycopg", "")
        with psycopg.connect(plain) as connection:
            connection.execute("CREATE TABLE t AS SELECT 7 AS n")
        own_postgresql.restart()
        with psycopg.connect(plain) as connection:
            assert connection.execute("SELECT n FROM t").fetchone() == (7,)
        with psycopg.connect(plain) as connection:
            assert connection.execute("SHOW fsync").fetchone() == ("on",)


def test_each_test_has_a_database_of_its_own(postgresql_url: str, redis_url: str) -> None:
    with psycopg.connect(postgresql_url.replace("+psycopg", "")) as connection:
        assert connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'").fetchone() == (0,)
    with redis.Redis.from_url(redis_url) as client:
        assert client.dbsize() == 0
        client.set("left", "behind")


def test_redis_restarts_and_flushes(own_redis: Redis) -> None:
    with own_redis.client() as client:
        client.config_set("appendfsync", "always")
        client.set("n", 7)
        own_redis.restart()
        assert client.get("n") == b"7"
        own_redis.flush()
        assert client.get("n") is None


@pytest.mark.kafka
def test_kafka_keeps_its_log_over_sigkill(own_kafka: KafkaBroker) -> None:
    _keeps_topics_over_sigkill(own_kafka)


def _keeps_topics_over_sigkill(broker: KafkaBroker) -> None:
    from confluent_kafka.admin import AdminClient

    Kafka(broker.bootstrap_servers, broker.kind).create_topics({"kept": 3})
    broker.restart()
    topics = AdminClient({"bootstrap.servers": broker.bootstrap_servers}).list_topics(timeout=10).topics
    assert len(topics["kept"].partitions) == 3


def test_rabbitmq_gives_virtual_hosts(own_rabbitmq: RabbitMQ) -> None:
    import amqp

    with amqp.Connection(
        f"127.0.0.1:{own_rabbitmq.port}", virtual_host=own_rabbitmq.new_vhost().rpartition("/")[2]
    ) as connection:
        channel = connection.channel()
        channel.queue_declare("q")
        channel.basic_publish(amqp.Message("hello"), routing_key="q")
        assert wait_until(lambda: channel.basic_get("q", no_ack=True)).body == "hello"


@contextmanager
def _started(*, mock: bool = True) -> Iterator[KafkaBroker]:
    broker = start_kafka(mock=mock)
    try:
        yield broker
    finally:
        broker.stop()


def test_a_given_kafka_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with MockKafka() as somebody_elses:
        monkeypatch.setenv(ADDRESS_VARIABLE, somebody_elses.bootstrap_servers)
        assert start_kafka().kind == "external"
    monkeypatch.setenv(ADDRESS_VARIABLE, "127.0.0.1:1")
    with pytest.raises(ServiceUnavailable, match=f"{ADDRESS_VARIABLE} = 127.0.0.1:1: no Kafka answers there"):
        start_kafka()


def test_without_docker_and_java_the_mock_cluster_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    with _started() as broker:
        assert (broker.kind, broker.real, broker.answers()) == ("mock", False, True)
    with pytest.raises(ServiceUnavailable, match=r"no Docker engine answers.*; Apache Kafka: no java on PATH"):
        start_kafka(mock=False)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """What speaks Docker's API and has Apache Kafka itself as the container."""
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    try:
        ApacheKafka().stop()
    except ServiceUnavailable as error:
        unavailable(error)
    with docker_engine() as engine:
        monkeypatch.setenv("DOCKER_HOST", engine.host)
        # On a machine that is itself a container testcontainers would look for the network that both share.
        monkeypatch.setattr(testcontainers_config, "connection_mode_override", ConnectionMode.docker_host)
        yield engine
        Reaper.delete_instance()
    assert not engine.containers


def test_where_an_engine_answers_kafka_runs_in_a_container_and_keeps_its_data(engine: Engine) -> None:
    with _started(mock=False) as broker:
        assert (broker.kind, broker.real, broker.answers()) == ("container", True, True)
        assert len(engine.containers) == 2, "Kafka, and the reaper that removes it if this process is killed"
        _keeps_topics_over_sigkill(broker)
    assert len(engine.containers) == 1


def test_a_container_that_ends_shows_its_log(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kafka._SETTINGS, "offsets.topic.num.partitions", "many")
    with pytest.raises(NotReady, match=r"Kafka's container is exited; (?s:.)*offsets\.topic\.num\.partitions"):
        start_kafka(mock=False)
    assert len(engine.containers) == 1


def test_an_engine_that_cannot_have_the_image_is_passed_over(engine: Engine) -> None:
    engine.images = frozenset({RYUK_IMAGE})
    with pytest.raises(ServiceUnavailable, match="Kafka's container: pull access denied"):
        ContainerKafka().__enter__()


def test_a_missing_service_skips_and_on_ci_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no redis-server"):
        unavailable(ServiceUnavailable("no redis-server"))
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="CI must have every service: no redis-server"):
        unavailable(ServiceUnavailable("no redis-server"))


@pytest.mark.usefixtures("own_redis")
def test_a_shared_server_ends_with_its_last_user(tmp_path: Path) -> None:
    with shared("redis", tmp_path) as first:
        with shared("redis", tmp_path) as second:
            assert second == first
        with redis.Redis.from_url(first["url"]) as client:
            assert client.ping()
    wait_until(lambda: not psutil.pid_exists(first["keeper"]), 10)
    with shared("redis", tmp_path) as third:
        assert third["keeper"] != first["keeper"]


@pytest.mark.usefixtures("own_redis")
def test_a_killed_user_leaves_no_shared_server(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from tests.services.shared import shared\n"
        "with shared('redis', Path(sys.argv[1])) as d:\n"
        "    print(d['keeper'], flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: not psutil.pid_exists(int(done.stdout)), 10)


def test_a_server_that_ends_at_once_shows_its_log(tmp_path: Path) -> None:
    process = ServerProcess([sys.executable, "-c", "print('no such disk'); raise SystemExit(3)"], log=tmp_path / "log")
    with pytest.raises(NotReady, match=r"ended with 3(?s:.)*no such disk"):
        process.start().until(lambda: False, 30)


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv, by which a server ends with its test")
def test_a_server_dies_with_a_killed_test(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from tests.services import ServerProcess\n"
        "command = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "print(ServerProcess(command, log=Path(sys.argv[1]) / 'log').start().pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    wait_until(lambda: not psutil.pid_exists(int(done.stdout)), 10)
