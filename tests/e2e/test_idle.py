"""What the background processes cost when there is nothing to do."""

from __future__ import annotations

import time

import psutil
import pytest

from celery_durable.settings import Settings
from celery_durable.up import EMBEDDED_FETCH_WAIT_MS
from tests.harness import Process, Stack

pytestmark = pytest.mark.processes

SETTLED_S, MEASURED_S, WINDOWS = 5.0, 10.0, 12
RESIDENT_MAX = 150 * 1024 * 1024
SHARE_MAX = 0.01
"""Of one core. On two cores with a load of 10 it was 0.85 % on the mock cluster: a busy machine adds, by cold caches,
and takes nothing away. So the quietest of the windows counts."""


def processor_seconds(process: Process) -> float:
    """User and system time so far."""
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


def test_idle_dispatcher_and_holder_cost_next_to_nothing(stack: Stack) -> None:
    """Below 1 % of a core each with the settings that users have, and below 150 MB resident."""
    settings: dict[str, int] = {"poll_max_ms": Settings.model_fields["poll_max_ms"].default}
    if not stack.kafka.real:
        settings["kafka_fetch_wait_max_ms"] = int(EMBEDDED_FETCH_WAIT_MS)
    service = stack.service(**settings)
    processes = [stack.holder(**settings), service.dispatcher()]
    service.worker()
    assert service.task("work").delay("tenant:acme").get(timeout=60) == "tenant:acme"
    # A measurement over time, so there is nothing to wait for but the time itself.
    time.sleep(SETTLED_S)
    least = {process.label: float("inf") for process in processes}
    for _ in range(WINDOWS):
        before = [processor_seconds(process) for process in processes]
        time.sleep(MEASURED_S)
        for process, begun in zip(processes, before, strict=True):
            share = (processor_seconds(process) - begun) / MEASURED_S
            least[process.label] = min(least[process.label], share)
        if max(least.values()) < SHARE_MAX:
            break
    resident = {process.label: psutil.Process(process.pid).memory_info().rss for process in processes}
    print({label: f"{share:.2%}" for label, share in least.items()}, resident)
    assert max(least.values()) < SHARE_MAX, least
    assert max(resident.values()) < RESIDENT_MAX, resident
