"""The stack that the tests of one module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import logs_of_the_module_stack, module_stack
from tests.harness import Kafka
from tests.mock_cluster import MockCluster

__all__ = ["logs_of_the_module_stack", "module_stack"]

SESSION_MS = 1_500
"""A member of a group that was killed is succeeded after this long."""
PUBLISH_MS = 2_000
"""What a killed relay had claimed is sent by another 5 s after this long."""


@pytest.fixture(scope="session")
def mock_kafka_server() -> Iterator[Kafka]:
    """A mock cluster of these tests' own: the embedded one has a group wait 3 s for its first member."""
    with MockCluster() as cluster:
        yield Kafka(cluster.bootstrap_servers, "mock")
