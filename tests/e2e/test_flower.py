"""Durable operations in a real Flower, through its HTTP API (case G2)."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.harness import Kafka, Process, Service, Stack, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.redis]


class Flower:
    """A Flower process."""

    def __init__(self, address: str) -> None:
        self._client = httpx.Client(base_url=address, timeout=5)

    def get(self, path: str, **parameters: Any) -> Any:
        """The answer as JSON; None while it has none."""
        try:
            answer = self._client.get(path, params=parameters)
        except httpx.TransportError:
            return None
        return answer.json() if answer.is_success else None

    def task(self, operation_id: str) -> dict[str, Any]:
        """What Flower knows of the operation; empty if nothing."""
        found: dict[str, Any] = (self.get("/api/tasks") or {}).get(operation_id) or {}
        return found

    def wait_for(self, operation_id: str, field: str, part: str, deadline_s: float = 30) -> None:
        """Waits until the field holds the part."""
        what = f"{part} in {field}"
        wait_until(lambda: part in (self.task(operation_id).get(field) or ""), deadline_s, what=what)

    def workers(self) -> dict[str, bool]:
        """Every worker in its list, and whether it is alive."""
        return dict(self.get("/api/workers", status=1) or {})

    def close(self) -> None:
        """Ends the client."""
        self._client.close()


@pytest.fixture
def stack(tmp_path: Path, mock_kafka: Kafka, redis_server: str, redis_numbers: Iterator[int]) -> Iterator[Stack]:
    """SQLite, the mock cluster, and Redis as the broker."""
    with Stack(tmp_path, kafka=mock_kafka, redis=(redis_server, redis_numbers)) as stack:
        yield stack
        print(stack.logs())


@pytest.fixture
def service(request: pytest.FixtureRequest, stack: Stack) -> Service:
    """With the settings that the test names."""
    service = stack.service("billing", **getattr(request, "param", {}))
    service.broker["task_send_sent_event"] = True  # what turns the events on
    stack.holder()
    service.dispatcher()
    return service


@pytest.fixture
def flower(stack: Stack, service: Service) -> Iterator[Flower]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "celery", "-A", "tests.example.app", "flower"]
    command += ["--address=127.0.0.1", f"--port={port}"]
    env = {**service.env, "FLOWER_UNAUTHENTICATED_API": "true"}
    stack.started(Process("flower", command, folder=service.folder, env=env))
    flower = Flower(f"http://127.0.0.1:{port}")
    wait_until(lambda: flower.get("/api/tasks") is not None, 60, what="Flower answers")
    yield flower
    flower.close()


def start_worker(service: Service, flower: Flower, label: str) -> Process:
    """A worker that sends events, which Flower knows."""
    worker = service.worker(label=label, extra=["--task-events"])
    wait_until(lambda: flower.workers().get(f"{label}@localhost"), 30, what=f"Flower knows {label}")
    return worker


def test_waiting_running_cancelled_lost_and_done(service: Service, flower: Flower) -> None:
    first = start_worker(service, flower, "first")
    work, sleep = service.task("work"), service.task("sleep")

    running = [work.apply_async(("acme", 8.0), group="wf-7") for _ in range(2)]
    for result in running:
        flower.wait_for(result.id, "state", "STARTED")
    waiting, unwanted = work.apply_async(("acme", 0.1), group="wf-7"), work.delay("acme", 0.1)
    wait_until(lambda: "account limit" in flower.task(waiting.id).get("kwargs", ""), 30, what="why it waits is seen")
    shown = flower.task(waiting.id)
    assert (shown["state"], shown["name"], shown.get("worker")) == ("PENDING", "example.work", None)
    assert "account='acme' group='wf-7' waits: account limit" in shown["kwargs"]

    unwanted.revoke()
    flower.wait_for(unwanted.id, "state", "REVOKED")

    for result in (*running, waiting):
        flower.wait_for(result.id, "state", "SUCCESS", deadline_s=60)
    shown = flower.task(waiting.id)
    assert (shown["worker"], shown["result"]) == ("first@localhost", "'acme'")
    assert "waits" not in shown["kwargs"]
    assert flower.workers() == {"first@localhost": True}

    lost = sleep.delay(3.0)
    flower.wait_for(lost.id, "state", "STARTED")
    first.kill()
    flower.wait_for(lost.id, "state", "RETRY")
    start_worker(service, flower, "second")
    flower.wait_for(lost.id, "state", "SUCCESS", deadline_s=60)
    assert flower.task(lost.id)["worker"] == "second@localhost"
    assert flower.workers() == {"first@localhost": False, "second@localhost": True}
    states = {state["state"] for state in flower.get("/api/tasks").values()}
    assert states == {"SUCCESS", "REVOKED"}


def test_what_ended_before_any_worker_was_there(service: Service, flower: Flower) -> None:
    """Cancelled or expired while it waited. Nobody is there to say so: the text does, then the first worker, idle."""
    work = service.task("work")
    cancelled, expired = work.delay("acme"), work.apply_async(("acme",), expires=0.5)
    wait_until(lambda: "waits" in flower.task(cancelled.id).get("kwargs", ""), 30, what="it waits in Flower")
    cancelled.cancel("not wanted")
    for name, reason in ((cancelled.id, "ended as cancelled: not wanted"), (expired.id, "expired before an attempt")):
        flower.wait_for(name, "kwargs", reason)
    assert flower.workers() == {}
    start_worker(service, flower, "first")
    for result in (cancelled, expired):
        flower.wait_for(result.id, "state", "REVOKED")
    assert flower.workers() == {"first@localhost": True}


@pytest.mark.parametrize("service", [{"max_worker_losses": 0}], indirect=True)
def test_a_worker_that_died_before_its_own_events(service: Service, flower: Flower) -> None:
    """Killed between the settle and the event, with another attempt under way that is not to run again."""
    first = start_worker(service, flower, "first")
    lost, settled = service.task("sleep").delay(60.0), service.task("linger").delay("acme")
    for result in (lost, settled):
        flower.wait_for(result.id, "state", "STARTED")
    wait_until(lambda: settled.state == "SUCCESS", 30, what="it has settled, its hook runs")
    first.kill()
    wait_until(lambda: lost.state == "FAILURE", 30, what="recovery finds the other")
    flower.wait_for(lost.id, "state", "FAILURE")
    start_worker(service, flower, "second")
    flower.wait_for(settled.id, "state", "SUCCESS", deadline_s=60)
    assert flower.task(settled.id)["worker"] == "first@localhost"
    assert flower.workers() == {"first@localhost": False, "second@localhost": True}
