"""A stack that the tests of one module share: to start processes costs seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.conftest import FAILED, unavailable
from tests.harness import EMBEDDED, REAL, Kafka, Stack
from tests.services import ServiceUnavailable

_STACK = pytest.StashKey[Stack]()


@pytest.fixture(
    scope="module",
    params=[
        EMBEDDED,
        pytest.param(REAL, marks=[pytest.mark.postgresql, pytest.mark.kafka, pytest.mark.redis]),
    ],
)
def module_stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """As ``stack``, for all tests of the module: each uses accounts of its own."""
    folder = tmp_path_factory.mktemp(f"stack-{request.param}")
    if request.param == EMBEDDED:
        kafka: Kafka = request.getfixturevalue("mock_kafka_server")
        stack = Stack(folder, kafka=replace(kafka, topic_prefix=Kafka.new_prefix()))
    else:
        kafka = request.getfixturevalue("kafka_server")
        if not kafka.real:
            unavailable(ServiceUnavailable("no Apache Kafka here, only the mock cluster"))
        stack = Stack(
            folder,
            kafka=replace(kafka, topic_prefix=Kafka.new_prefix()),
            postgresql=request.getfixturevalue("postgresql_server"),
            redis=(request.getfixturevalue("redis_server"), request.getfixturevalue("redis_numbers")),
        )
    request.node.stash[_STACK] = stack
    with stack:
        yield stack


@pytest.fixture(autouse=True)
def logs_of_the_module_stack(request: pytest.FixtureRequest) -> Iterator[None]:
    """Prints what the shared processes wrote, after a test that failed."""
    yield
    module = request.node.getparent(pytest.Module)
    if request.node.stash.get(FAILED, False) and module is not None and _STACK in module.stash:
        print(module.stash[_STACK].logs())
