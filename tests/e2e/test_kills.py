"""Killed workers, doubled messages and clocks that are wrong, with the real dispatcher and holder around them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from celery.exceptions import WorkerLostError

from tests.e2e.observe import History, operation, rows
from tests.harness import EMBEDDED, REPOSITORY, Process, Service, Stack, wait_until

pytestmark = pytest.mark.processes

HEARTBEAT_TIMEOUT_S = 4.0
"""As the harness sets it."""
CLOCK = Path(__file__).with_name("wrong_clock")


@pytest.fixture(scope="module")
def service(module_stack: Stack) -> Service:
    # No message is sent again within a test, but by the test itself.
    service = module_stack.service(resend_min_s=60.0)
    module_stack.holder()
    service.dispatcher()
    return service


@pytest.fixture
def worker(service: Service) -> Iterator[Process]:
    """A worker that the test may kill."""
    process = service.worker(concurrency=2)
    yield process
    process.kill()


def outcomes(service: Service, operation_id: str) -> list[str]:
    """How its attempts ended, but for the last."""
    return [outcome for (outcome,) in rows(service, "attempts", "outcome", operation_id=operation_id)]


def test_a_killed_worker(service: Service, worker: Process) -> None:
    """Case C1: killed with SIGKILL in mid-task: retried once its heartbeats are overdue, its permit with it."""
    account, flag = "tenant:killed", service.folder / "killed"
    lost = service.task("until").delay(account, str(flag))
    wait_until(lambda: History([service]).starts()[lost.id] == 1, 60, what="its body runs")
    worker.kill()
    # By its last heartbeat; records have the machine's monotonic time.
    proven_lost_ns = time.monotonic_ns() + operation(service, lost.id).alive_until * 1_000_000 - time.time_ns()
    waiting = [service.task("work").delay(account) for _ in range(3)]
    second = service.worker(concurrency=2)
    try:
        wait_until(lambda: History([service]).starts()[lost.id] == 2, 60, what="the second attempt")
        again_ns = max(r.time_ns for r in service.records() if r.operation_id == lost.id and r.event == "start")
        assert again_ns > proven_lost_ns - 10_000_000, "clocks of one machine, read one after the other"
        flag.touch()
        assert lost.get(timeout=60) > 0
        for result in waiting:
            assert result.get(timeout=60) == account
        assert outcomes(service, lost.id) == ["lost"]
        assert operation(service, lost.id).worker_losses == 1
        History([service]).check_bound(2, account=account)
    finally:
        second.kill()


def test_killed_every_time(service: Service, worker: Process) -> None:
    """Case C1: killed every time: it ends as failed after the cap, and the next of its account has the permit."""
    account = "tenant:suicide"
    doomed = service.task("suicide").delay(account)
    next_one = service.task("limited").delay(account, 1)
    wait_until(lambda: operation(service, doomed.id).state == "failed", 60, what="its end")
    assert History([service]).starts()[doomed.id] == 2
    assert outcomes(service, doomed.id) == ["lost", "lost"]
    assert isinstance(doomed.get(timeout=1, propagate=False), WorkerLostError)
    assert next_one.get(timeout=60) == account


def test_killed_after_the_settle(service: Service) -> None:
    """Case C2: killed after the settle, before the acknowledgement: not run again, its result kept."""
    account = "tenant:settled"
    result = service.task("linger").delay(account)
    message = sent(service, result.id)
    first = service.worker(concurrency=1)
    assert result.get(timeout=60) == account
    row = operation(service, result.id)
    first.kill()
    put(service, message)
    second = service.worker(concurrency=1)
    try:
        wait_until(lambda: f"[{result.id}] not started" in second.log.read_text(), 60, what="the copy's refusal")
        assert operation(service, result.id) == row
        assert History([service]).starts()[result.id] == 1
        assert result.get(timeout=1) == account
    finally:
        second.kill()


def test_delivered_twice_at_once(service: Service) -> None:
    """Case C5: the dispatcher's own message, four times in the broker, taken by four children at once: one attempt."""
    results = [service.task("work").delay(f"tenant:twice-{number}", 0.2) for number in range(5)]
    for result in results:
        message = sent(service, result.id)
        for _ in range(3):
            put(service, message)
    worker = service.worker(concurrency=4)
    try:
        for result in results:
            assert result.get(timeout=60).startswith("tenant:twice")

        def refused() -> bool:
            log = worker.log.read_text()
            return all(log.count(f"[{result.id}] not started") == 3 for result in results)

        wait_until(refused, 60, what="every copy is refused")
        for result in results:
            assert History([service]).starts()[result.id] == 1
            assert not outcomes(service, result.id)
            assert operation(service, result.id).state == "succeeded"
    finally:
        worker.kill()


def test_a_clock_that_is_an_hour_off(service: Service) -> None:
    """Case C17: a worker an hour ahead and an enqueuer an hour behind: all times follow the database's clock."""
    ahead, behind = ({"PYTHONPATH": str(CLOCK), "WRONG_CLOCK_S": offset} for offset in ("3600", "-3600"))
    worker = service.worker(concurrency=2, env=ahead)
    try:
        running = service.task("work").delay("tenant:clock", HEARTBEAT_TIMEOUT_S * 1.5)
        retried = service.task("flaky").delay("tenant:clock-retry", 1, 1.0)
        script = "from tests.example.app import app; app.tasks['example.sleep'].apply_async((0,), task_id='late', "
        done = subprocess.run(
            [sys.executable, "-c", script + "countdown=2)"],
            cwd=REPOSITORY,
            env={**os.environ, **service.env, **behind},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        enqueued_ns = time.monotonic_ns()
        wait_until(lambda: operation(service, "late").state == "succeeded", 60, what="the countdown")
        assert running.get(timeout=60) == "tenant:clock"
        assert retried.get(timeout=60) == 1
        starts = {record.operation_id: record.time_ns for record in service.records() if record.event == "start"}
        late = operation(service, "late")
        assert late.started_at - late.enqueued_at >= 2_000
        assert starts["late"] - enqueued_ns < 60e9
        assert not outcomes(service, running.id)
        first, second = (r.time_ns for r in service.records() if r.operation_id == retried.id and r.event == "start")
        assert 1e9 <= second - first < 60e9
        ends = operation(service, running.id)
        assert ends.ended_at - ends.started_at < 60_000
        assert abs(ends.ended_at - time.time() * 1000) < 120_000
    finally:
        worker.kill()


def sent(service: Service, operation_id: str) -> str:
    """The message of the operation in the Celery broker, as the dispatcher sent it; no worker may run."""

    def look() -> str | None:
        return next((raw for raw in queued(service) if json.loads(raw)["headers"]["id"] == operation_id), None)

    return wait_until(look, 60, what="the message")


def queued(service: Service) -> list[str]:
    """Every message in the queue."""
    if service.stack.kind == EMBEDDED:
        files = sorted((service.folder.parent / f"{service.name}-broker" / "queues" / "celery").glob("*"))
        return [file.read_text() for file in files]
    with redis.Redis.from_url(service.broker["broker_url"]) as client:
        return [raw.decode() for raw in client.lrange("celery", 0, -1)]


def put(service: Service, raw: str) -> None:
    """Puts a copy into the queue, as a broker that delivers again would."""
    message = json.loads(raw)
    message["properties"]["delivery_tag"] = str(uuid.uuid4())
    copy = json.dumps(message)
    if service.stack.kind == EMBEDDED:
        broker = service.folder.parent / f"{service.name}-broker"
        partial = broker / "partial" / uuid.uuid4().hex
        partial.write_text(copy)
        partial.replace(broker / "queues" / "celery" / f"{time.time_ns():020d}-{uuid.uuid4().hex}")
        return
    with redis.Redis.from_url(service.broker["broker_url"]) as client:
        client.lpush("celery", copy)
