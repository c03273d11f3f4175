"""Fixtures for all tests: real services, and the two stacks that integration tests run on."""

from __future__ import annotations

import itertools
import os
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.harness import EMBEDDED, REAL, Kafka, Stack
from tests.services import KafkaBroker, PostgreSQL, RabbitMQ, Redis, ServiceUnavailable, start_kafka
from tests.services.postgresql import fresh_database
from tests.services.redis import DATABASES
from tests.services.shared import shared

# Every xdist worker draws Redis databases from a range of its own.
_REDIS_DATABASES_PER_WORKER = 500


def unavailable(error: ServiceUnavailable) -> None:
    """Skips the test; on CI, where every service is to be had, fails it."""
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(f"CI must have every service: {error}", pytrace=False)
    pytest.skip(str(error))


@pytest.fixture(scope="session")
def services_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder through which the processes of this test run share servers."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "services"


def _shared(name: str, folder: Path) -> Iterator[dict[str, Any]]:
    with ExitStack() as stack:
        try:
            description = stack.enter_context(shared(name, folder))
        except ServiceUnavailable as error:
            unavailable(error)
            raise
        yield description


@pytest.fixture(scope="session")
def postgresql_server(services_folder: Path) -> Iterator[str]:
    """The URL of the test run's PostgreSQL."""
    for description in _shared("postgresql", services_folder):
        yield description["url"]


@pytest.fixture
def postgresql_url(postgresql_server: str) -> Iterator[str]:
    """The URL of a fresh PostgreSQL database."""
    with fresh_database(postgresql_server) as url:
        yield url


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of a fresh SQLite database."""
    return f"sqlite:///{tmp_path / 'test.sqlite3'}"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgresql)])
def database_url(request: pytest.FixtureRequest) -> str:
    """The URL of a fresh database: the test runs on SQLite and on PostgreSQL."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture(scope="session")
def redis_server(services_folder: Path) -> Iterator[str]:
    """The address of the test run's Redis, without a database number."""
    for description in _shared("redis", services_folder):
        yield description["url"].rpartition("/")[0]


@pytest.fixture(scope="session")
def redis_numbers() -> Iterator[int]:
    """Numbers of Redis databases that no other test of this run uses."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = 1 + worker * _REDIS_DATABASES_PER_WORKER % (DATABASES - _REDIS_DATABASES_PER_WORKER)
    return itertools.cycle(range(first, first + _REDIS_DATABASES_PER_WORKER))


@pytest.fixture
def redis_url(redis_server: str, redis_numbers: Iterator[int]) -> Iterator[str]:
    """The URL of an empty Redis database."""
    import redis

    url = f"{redis_server}/{next(redis_numbers)}"
    with redis.Redis.from_url(url) as client:
        client.flushdb()
        yield url
        client.flushdb()


@pytest.fixture(scope="session")
def kafka_server(services_folder: Path) -> Iterator[Kafka]:
    """The test run's Kafka: the first that works here."""
    for description in _shared("kafka", services_folder):
        yield Kafka(description["bootstrap_servers"], description["kind"])


@pytest.fixture
def kafka(kafka_server: Kafka) -> Kafka:
    """The test run's Kafka, with a topic prefix of the test's own."""
    return replace(kafka_server, topic_prefix=Kafka.new_prefix())


@pytest.fixture(scope="session")
def mock_kafka_server(services_folder: Path) -> Iterator[Kafka]:
    """The test run's mock cluster."""
    for description in _shared("mock-kafka", services_folder):
        yield Kafka(description["bootstrap_servers"], description["kind"])


@pytest.fixture
def mock_kafka(mock_kafka_server: Kafka) -> Kafka:
    """The test run's mock cluster, with a topic prefix of the test's own."""
    return replace(mock_kafka_server, topic_prefix=Kafka.new_prefix())


@pytest.fixture
def apache_kafka(kafka: Kafka) -> Kafka:
    """As ``kafka``, and never the mock cluster."""
    if not kafka.real:
        unavailable(ServiceUnavailable("no Apache Kafka here, only the mock cluster"))
    return kafka


def _own(server: Any) -> Iterator[Any]:
    try:
        started = server()
    except ServiceUnavailable as error:
        unavailable(error)
        raise
    with started as running:
        yield running


@pytest.fixture
def own_postgresql() -> Iterator[PostgreSQL]:
    """A PostgreSQL of the test's own, which it may kill and restart."""
    yield from _own(PostgreSQL)


@pytest.fixture
def own_redis() -> Iterator[Redis]:
    """A Redis of the test's own, which it may kill, restart and flush."""
    yield from _own(Redis)


@pytest.fixture
def own_rabbitmq() -> Iterator[RabbitMQ]:
    """A RabbitMQ of the test's own, which it may kill and restart."""
    yield from _own(RabbitMQ)


@pytest.fixture
def own_kafka() -> Iterator[KafkaBroker]:
    """An Apache Kafka of the test's own, which it may kill and restart."""
    try:
        broker = start_kafka(mock=False, external=False)
    except ServiceUnavailable as error:
        unavailable(error)
        raise
    try:
        yield broker
    finally:
        broker.stop()


@pytest.fixture(
    params=[
        EMBEDDED,
        pytest.param(REAL, marks=[pytest.mark.postgresql, pytest.mark.kafka, pytest.mark.redis]),
    ]
)
def stack(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stack]:
    """Everything a deployment needs: (SQLite, mock cluster, a folder as broker), then (PostgreSQL, Kafka, Redis)."""
    yield from _stack(request, tmp_path, request.param)


@pytest.fixture
def embedded_stack(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stack]:
    """SQLite, mock cluster, a folder as the Celery broker."""
    yield from _stack(request, tmp_path, EMBEDDED)


@pytest.fixture
def real_stack(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stack]:
    """PostgreSQL, Apache Kafka, Redis."""
    yield from _stack(request, tmp_path, REAL)


def _stack(request: pytest.FixtureRequest, folder: Path, kind: str) -> Iterator[Stack]:
    if kind == EMBEDDED:
        stack = Stack(folder, kafka=request.getfixturevalue("mock_kafka"))
    else:
        stack = Stack(
            folder,
            kafka=request.getfixturevalue("apache_kafka"),
            postgresql=request.getfixturevalue("postgresql_server"),
            redis=(request.getfixturevalue("redis_server"), request.getfixturevalue("redis_numbers")),
        )
    with stack:
        yield stack
        if request.node.stash.get(FAILED, False):
            print(stack.logs())


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Notes a failure, so that a fixture's end can print the logs of the processes that it started."""
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report
