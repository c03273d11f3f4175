"""The whole path once, on both stacks: enqueue, queue, permit, delivery, worker, result."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from tests.example.records import most_at_once
from tests.harness import Stack, wait_until

pytestmark = pytest.mark.processes


def test_operations_with_and_without_an_account_succeed(stack: Stack) -> None:
    """Case A21: the first operation on an unseen account is admitted, and its limit holds."""
    service = stack.service()
    processes = [stack.holder(), service.dispatcher(), service.worker(concurrency=4)]
    plain = service.task("add").delay(1, 2)
    limited = [service.task("work").delay("tenant:acme", 0.2) for _ in range(8)]
    assert plain.get(timeout=30) == 3
    assert [result.get(timeout=60) for result in limited] == ["tenant:acme"] * 8
    assert most_at_once(service.records())["tenant:acme"] == 2
    assert_no_kafka_client(processes[2].pid)
    for process in reversed(processes):
        assert process.terminate() == 0, process.labelled()


def test_a_stack_leaves_no_process(embedded_stack: Stack) -> None:
    service = embedded_stack.service()
    holder, dispatcher, worker = embedded_stack.holder(), service.dispatcher(), service.worker()
    worker.freeze()
    sessions = {process.pid for process in (holder, dispatcher, worker)}
    embedded_stack.close()

    def left() -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if _session(process) in sessions]

    wait_until(lambda: not left(), 10, what="end of every process")
    assert holder.returncode in (0, -signal.SIGKILL)


def assert_no_kafka_client(worker: int) -> None:
    """Rule 3: neither the worker nor its pool has librdkafka loaded."""
    family = [psutil.Process(worker), *psutil.Process(worker).children(recursive=True)]
    assert len(family) > 1
    for process in family:
        assert not [loaded.path for loaded in process.memory_maps() if "rdkafka" in loaded.path]


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return None
