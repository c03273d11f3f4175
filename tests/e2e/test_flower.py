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

    def state(self, operation_id: str) -> str | None:
        """The state that Flower shows."""
        state: str | None = self.task(operation_id).get("state")
        return state

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
def service(stack: Stack) -> Service:
    service = stack.service("billing")
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
        wait_until(lambda result=result: flower.state(result.id) == "STARTED", 30, what="the first two run")
    waiting, unwanted = work.apply_async(("acme", 0.1), group="wf-7"), work.delay("acme", 0.1)
    wait_until(lambda: "account limit" in flower.task(waiting.id).get("kwargs", ""), 30, what="why it waits is seen")
    shown = flower.task(waiting.id)
    assert (shown["state"], shown["name"], shown.get("worker")) == ("PENDING", "example.work", None)
    assert "account='acme' group='wf-7' waits: account limit" in shown["kwargs"]

    unwanted.revoke()
    wait_until(lambda: flower.state(unwanted.id) == "REVOKED", 30, what="the cancelled one is seen")

    for result in (*running, waiting):
        wait_until(lambda result=result: flower.state(result.id) == "SUCCESS", 60, what="all three end")
    shown = flower.task(waiting.id)
    assert (shown["worker"], shown["result"]) == ("first@localhost", "'acme'")
    assert "waits" not in shown["kwargs"]
    assert flower.workers() == {"first@localhost": True}

    lost = sleep.delay(3.0)
    wait_until(lambda: flower.state(lost.id) == "STARTED", 30, what="it runs")
    first.kill()
    wait_until(lambda: flower.state(lost.id) == "RETRY", 30, what="its loss is seen")
    start_worker(service, flower, "second")
    wait_until(lambda: flower.state(lost.id) == "SUCCESS", 60, what="it ends on the second worker")
    assert flower.task(lost.id)["worker"] == "second@localhost"
    assert flower.workers() == {"first@localhost": False, "second@localhost": True}
    states = {state["state"] for state in flower.get("/api/tasks").values()}
    assert states == {"SUCCESS", "REVOKED"}
