"""What ``make recovery-times`` measures at length, once: the bounds of docs/guarantees.md, section "Recovery times"."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.chaos.recovery_times import Figure, Rig, lost_holders, lost_workers
from tests.conftest import unavailable
from tests.harness import Kafka
from tests.services import ServiceUnavailable

pytestmark = [pytest.mark.processes, pytest.mark.postgresql, pytest.mark.kafka, pytest.mark.redis]


@pytest.fixture
def rig(
    tmp_path: Path, postgresql_server: str, kafka_server: Kafka, redis_server: str, redis_numbers: Iterator[int]
) -> Rig:
    if not kafka_server.real:
        unavailable(ServiceUnavailable("no Apache Kafka here, only the mock cluster"))
    return Rig(tmp_path, postgresql_server, kafka_server, redis_server, redis_numbers)


def require(figures: Sequence[Figure]) -> None:
    for figure in figures:
        told = f"{figure.name}: not within {figure.bound_s} s: {figure.seconds}, before: {figure.before_s}"
        assert figure.holds_on_a_busy_machine, told


def test_a_killed_workers_operation_runs_again_within_its_heartbeat_timeout_and_2_s(rig: Rig) -> None:
    """Case C1."""
    require([lost_workers(rig, 2, random.Random(1))])


@pytest.mark.parametrize("protocol", ["consumer", "classic"])
def test_a_killed_holder_stops_new_permits_for_its_session_timeout_and_2_s_and_no_lease(
    rig: Rig, protocol: str
) -> None:
    """Waiting operations of every partition move again; work under a lease never waits for it."""
    require(lost_holders(rig, protocol, 1))
