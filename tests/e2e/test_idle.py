"""What the background processes cost when there is nothing to do."""

from __future__ import annotations

import time

import psutil
import pytest

from tests.harness import EMBEDDED, REAL, Process, Stack

pytestmark = pytest.mark.processes

SETTLED_S, MEASURED_S = 5.0, 15.0
RESIDENT_MAX = 150 * 1024 * 1024
DEFAULT_POLL_MS = 250
SHARE_MAX = {REAL: 0.01, EMBEDDED: 0.02}
"""Of one core. The mock cluster answers an empty fetch after 5 ms, and each answer costs its reader a little."""


def processor_seconds(process: Process) -> float:
    """User and system time so far."""
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


def test_idle_dispatcher_and_holder_cost_next_to_nothing(stack: Stack) -> None:
    """Below 1 % of a core each with the default settings (2 % on the mock cluster), and below 150 MB resident."""
    service = stack.service(poll_max_ms=DEFAULT_POLL_MS)
    processes = [stack.holder(poll_max_ms=DEFAULT_POLL_MS), service.dispatcher()]
    service.worker()
    assert service.task("work").delay("tenant:acme").get(timeout=60) == "tenant:acme"
    # A measurement over time, so there is nothing to wait for but the time itself.
    time.sleep(SETTLED_S)
    before = [processor_seconds(process) for process in processes]
    time.sleep(MEASURED_S)
    shares = {
        process.label: (processor_seconds(process) - begun) / MEASURED_S
        for process, begun in zip(processes, before, strict=True)
    }
    resident = {process.label: psutil.Process(process.pid).memory_info().rss for process in processes}
    assert max(shares.values()) < SHARE_MAX[stack.kind], shares
    assert max(resident.values()) < RESIDENT_MAX, resident
