"""What is said to readers of Celery's events, and what Celery's own state of them makes of it (case G2)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.events.state import State
from sqlalchemy import delete, update

from celery_durable.monitoring import events
from celery_durable.runtime import Runtime
from celery_durable.store.clock import now_ms
from tests.unit.monitoring.rows import add, add_account, make_runtime


@pytest.fixture
def runtime(database_url: str) -> Iterator[Runtime]:
    runtime = make_runtime(database_url)
    yield runtime
    runtime.database.dispose()


class Reader:
    """A reader of events, as Flower is one, on the in-memory transport."""

    def __init__(self, runtime: Runtime) -> None:
        self._app = Celery("billing", broker="memory://", set_as_current=False)
        self._clock = 0
        self.state = State()
        self.senders: set[str | None] = set()
        self.sent: list[tuple[str, str]] = []
        self.events = events.Events(self._app, runtime)
        self.events._sender._publish = self._publish  # type: ignore[method-assign]
        self.broker_away = False

    def _publish(self, event: events.Event) -> None:
        if self.broker_away:
            raise ConnectionError("away")
        self.senders.add(event.worker)
        self.sent.append((event.type, event.fields.get("uuid", "")))
        self.tell(event.type, hostname=event.worker or "durable@billing", **event.fields)

    def tell(self, kind: str, **fields: Any) -> None:
        """One event, a worker's for instance."""
        self._clock += 1
        fields = {"timestamp": self._clock, "local_received": self._clock, "clock": self._clock, **fields}
        self.state.event({"type": kind, **fields})

    def task(self, operation_id: str) -> Any:
        return self.state.tasks[operation_id]

    def worker_runs(self, operation_id: str) -> None:
        for kind in ("task-received", "task-started"):
            self.tell(kind, uuid=operation_id, hostname="celery@one", name="charge", args="()", kwargs="{}")


def change(runtime: Runtime, operation_id: str, **values: Any) -> None:
    operations = runtime.tables.operations
    with runtime.database.transaction() as connection:
        connection.execute(update(operations).where(operations.c.id == operation_id).values(values))


def test_a_waiting_operation_is_there_with_its_account_group_and_reason(runtime: Runtime) -> None:
    reader = Reader(runtime)
    add(runtime, "one", "queued", group="wf-7")
    add_account(runtime, "acme", blocked={"wf-7": "group_limit"}, limit=3, in_use=3)
    assert reader.events.step() == events.LOOK_EVERY_S
    task = reader.task("one")
    assert (task.state, task.name, task.args) == ("PENDING", "charge", "('acme',)")
    assert task.kwargs == "{'amount': 12} | account='acme' group='wf-7' waits: group limit"
    assert not reader.state.workers  # no phantom


def test_a_reason_is_said_once_and_again_when_it_changes(runtime: Runtime) -> None:
    reader = Reader(runtime)
    add(runtime, "one", "queued")
    reader.events.step()
    reader.events.step()
    assert reader.sent == [("task-sent", "one")]
    add_account(runtime, "acme", blocked={"": "paused"}, limit=3, in_use=0)
    reader.events.step()
    assert reader.task("one").kwargs.endswith("waits: paused")
    reader.worker_runs("one")
    change(runtime, "one", state="running", started_at=now_ms())
    reader.events.step()
    assert (reader.task("one").state, reader.task("one").kwargs) == ("STARTED", "{}")
    assert len(reader.sent) == 2


def test_a_lost_attempt_is_retried_and_then_received_by_the_next_worker(runtime: Runtime) -> None:
    reader = Reader(runtime)
    add(runtime, "one", "running")
    reader.events.step()
    reader.worker_runs("one")
    change(runtime, "one", state="retrying", attempt=2, worker_losses=1, due_at=now_ms())
    reader.events.step()
    assert reader.task("one").state == "RETRY"
    assert list(reader.state.workers) == ["celery@one"]
    assert not reader.state.workers["celery@one"].alive
    reader.worker_runs("one")
    assert reader.task("one").state == "STARTED"


def test_an_operation_that_ends_without_a_worker_does_not_stay_as_it_was(runtime: Runtime) -> None:
    reader = Reader(runtime)
    for name in ("cancelled", "expired", "lost", "never-ran"):
        add(runtime, name, "queued")
    add(runtime, "runs", "running", worker="celery@one")
    reader.events.step()
    reader.worker_runs("lost")
    change(runtime, "cancelled", state="cancelled", ended_at=now_ms())
    change(runtime, "expired", state="cancelled", ended_at=now_ms(), expires_at=now_ms() - 1_000)
    change(
        runtime,
        "lost",
        state="failed",
        worker_losses=4,
        started_at=now_ms(),
        ended_at=now_ms(),
        error="lost",
        worker="celery@one",
    )
    change(runtime, "never-ran", state="failed", ended_at=now_ms(), error="no such task")
    reader.events.step()
    states = {name: reader.task(name).state for name in ("cancelled", "expired", "lost", "never-ran")}
    assert states == {"cancelled": "REVOKED", "expired": "REVOKED", "lost": "FAILURE", "never-ran": "FAILURE"}
    assert reader.task("expired").expired is True
    assert reader.task("lost").exception == "lost"
    assert list(reader.state.workers) == ["celery@one"]
    sent = len(reader.sent)
    reader.events.step()
    assert len(reader.sent) == sent


def test_a_cancelled_operation_waits_for_a_worker_that_may_speak_for_it(runtime: Runtime) -> None:
    """A name of our own would be one more worker in Flower's list, and stay there."""
    reader = Reader(runtime)
    add(runtime, "one", "queued")
    reader.events.step()
    change(runtime, "one", state="cancelled", ended_at=now_ms())
    reader.events.step()
    assert reader.task("one").state == "PENDING"
    assert not reader.state.workers
    add(runtime, "two", "running", worker="celery@two")
    reader.events.step()
    assert (reader.task("one").state, list(reader.state.workers)) == ("REVOKED", ["celery@two"])
    assert not reader.events._tracked.keys() - {2}


def test_what_a_worker_tells_is_left_to_it(runtime: Runtime) -> None:
    reader = Reader(runtime)
    add(runtime, "good", "running")
    add(runtime, "bad", "running")
    reader.events.step()
    change(runtime, "good", state="succeeded", ended_at=now_ms())
    change(runtime, "bad", state="failed", ended_at=now_ms(), error="ValueError")
    reader.events.step()
    assert reader.sent == []


def test_a_broker_that_is_away_costs_nothing_and_is_caught_up_with(runtime: Runtime) -> None:
    reader = Reader(runtime)
    reader.broker_away = True
    add(runtime, "one", "queued")
    assert reader.events.step() == events.BROKER_AWAY_S
    reader.broker_away = False
    reader.events.step()
    assert reader.task("one").state == "PENDING"


def test_a_long_backlog_is_told_in_batches_without_a_pause(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "BATCH", 5)
    monkeypatch.setattr(events, "OVERLAP", 2)
    monkeypatch.setattr(events, "TRACKED_MAX", 1_000)
    reader = Reader(runtime)
    reader.events.step()
    for number in range(23):
        add(runtime, f"op-{number}", "queued")
    steps = 0
    while reader.events.step() is None:
        steps += 1
        assert steps < 10
    assert {uuid for _, uuid in reader.sent} == {f"op-{number}" for number in range(23)}
    assert len(reader.sent) == 23


def test_what_retention_deleted_is_forgotten(runtime: Runtime) -> None:
    reader = Reader(runtime)
    add(runtime, "one", "queued")
    reader.events.step()
    with runtime.database.transaction() as connection:
        connection.execute(delete(runtime.tables.operations))
        connection.execute(delete(runtime.tables.payloads))
    reader.events.step()
    assert not reader.events._tracked


def test_it_is_off_unless_the_app_sends_such_events() -> None:
    app = Celery("billing", broker="memory://", set_as_current=False)
    app.conf.durable = {}  # not even a database is needed
    assert events.make_step(app)() == float("inf")
