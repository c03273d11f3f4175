"""What is said to readers of Celery's events, and what Celery's own state of them makes of it (case G2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from celery import Celery
from celery.events.state import State
from sqlalchemy import delete, insert, update

from celery_durable.monitoring import event_words as words
from celery_durable.monitoring import events
from celery_durable.monitoring.event_words import Event
from celery_durable.monitoring.unproven import Life
from celery_durable.runtime import Runtime
from celery_durable.store.clock import now_ms
from tests.unit.monitoring.rows import add, add_account, make_runtime


@pytest.fixture
def runtime(database_url: str) -> Iterator[Runtime]:
    runtime = make_runtime(database_url)
    yield runtime
    runtime.database.dispose()


class Reader:
    """A reader of events, as Flower is one, and the workers that answer."""

    def __init__(self, runtime: Runtime, *, asks: bool = True) -> None:
        self._clock = 0
        self.state = State()
        self.sent: list[tuple[str, str]] = []
        self.broker_away = False
        self.living: dict[str, Life] = {}
        self.asked = 0
        self.events = events.Events(runtime, self, asks=asks)

    def look(self) -> float | None:
        """One step, in which workers may be asked."""
        self.events._ask_at = 0.0
        return self.events.step()

    def send(self, event: Event) -> None:
        if self.broker_away:
            raise ConnectionError("away")
        self.sent.append((event.type, event.fields["uuid"]))
        self.tell(event.type, hostname=event.worker or "durable@billing", **event.fields)
        if event.gone:
            self.tell("worker-offline", hostname=event.worker)

    def lives(self, workers: Sequence[str]) -> Mapping[str, Life]:
        self.asked += 1
        return {name: life for name, life in self.living.items() if name in workers}

    def any_worker(self) -> str | None:
        self.asked += 1
        return next(iter(self.living), None)

    def close(self) -> None:
        pass

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


def end(runtime: Runtime, operation_id: str, state: str, *, ago_s: float = 3.0, **values: Any) -> None:
    """The operation ends."""
    change(runtime, operation_id, state=state, ended_at=now_ms() - round(ago_s * 1000), **values)


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
    end(runtime, "cancelled", "cancelled")
    end(runtime, "expired", "cancelled", expires_at=now_ms() - 4_000)
    lose(runtime, "lost", "celery@one")
    end(runtime, "never-ran", "failed", error="no such task")
    reader.events.step()
    states = {name: reader.task(name).state for name in ("cancelled", "expired", "lost", "never-ran")}
    assert states == {"cancelled": "REVOKED", "expired": "REVOKED", "lost": "FAILURE", "never-ran": "FAILURE"}
    assert reader.task("expired").expired is True
    assert reader.task("lost").exception == "lost"
    assert list(reader.state.workers) == ["celery@one"]
    sent = len(reader.sent)
    reader.events.step()
    assert len(reader.sent) == sent


def lose(runtime: Runtime, operation_id: str, worker: str) -> None:
    """The operation fails, since its last attempt was lost."""
    values = {"worker": worker, "started_at": now_ms() - 9_000, "run_token": "token", "worker_losses": 4}
    end(runtime, operation_id, "failed", error="lost", **values)
    history = {"operation_id": operation_id, "generation": 1, "attempt": 4, "run_token": "token", "outcome": "lost"}
    with runtime.database.transaction() as connection:
        connection.execute(insert(runtime.tables.attempts).values(ended_at=now_ms(), **history))


def test_a_cancelled_operation_waits_for_a_worker_that_may_speak_for_it(runtime: Runtime) -> None:
    """A name of our own would be one more worker in Flower's list, and stay there. Meanwhile the text says it."""
    reader = Reader(runtime)
    add(runtime, "one", "queued")
    reader.events.step()
    end(runtime, "one", "cancelled", error="not wanted")
    reader.look()
    reader.look()
    assert reader.sent == [("task-sent", "one")] * 2
    assert reader.task("one").state == "PENDING"
    assert reader.task("one").args == "('acme',)"
    assert reader.task("one").kwargs.startswith("| account='acme' ended as cancelled: not wanted; ")
    assert not reader.state.workers
    reader.living["celery@idle"] = Life(60.0, frozenset())
    reader.look()
    assert (reader.task("one").state, list(reader.state.workers)) == ("REVOKED", ["celery@idle"])
    assert not reader.events._unannounced
    assert not reader.events._without_worker


def test_ends_that_wait_for_a_worker_cost_nothing(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 of them, looked at every second, took a dispatcher without workers 3 % of a core."""
    reader = Reader(runtime)
    add(runtime, "one", "queued")
    reader.events.step()
    end(runtime, "one", "cancelled", error="not wanted")
    reader.events.step()
    judged: list[Any] = []
    monkeypatch.setattr(words, "by_worker", lambda row: judged.append(row.id))
    reader.events.step()
    assert not judged


def test_a_worker_that_lived_long_ago_does_not_speak(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be shown as alive once more."""
    monkeypatch.setattr(events, "ASK_EVERY_S", 0.0)
    reader = Reader(runtime)
    add(runtime, "runs", "running", worker="celery@one")
    add(runtime, "unwanted", "queued")
    reader.events.step()
    change(runtime, "runs", alive_until=now_ms() - 1)
    end(runtime, "unwanted", "cancelled")
    reader.look()
    assert reader.task("unwanted").state == "PENDING"
    assert not reader.state.workers


def test_one_that_was_cancelled_between_attempts_is_told_by_the_worker_of_the_last_one(runtime: Runtime) -> None:
    """Should no other be there: declared offline again."""
    reader = Reader(runtime)
    add(runtime, "one", "retrying", worker="celery@one", started_at=now_ms() - 5_000)
    reader.events.step()
    end(runtime, "one", "cancelled")
    reader.look()
    assert reader.task("one").state == "REVOKED"
    assert not reader.state.workers["celery@one"].alive


def test_what_a_worker_tells_is_left_to_it(runtime: Runtime) -> None:
    reader = Reader(runtime)
    reader.living["celery@one"] = Life(60.0, frozenset())
    add(runtime, "good", "running")
    add(runtime, "bad", "running")
    reader.events.step()
    end(runtime, "good", "succeeded")
    end(runtime, "bad", "failed", error="ValueError")
    reader.look()
    assert reader.asked == 1
    reader.living.clear()
    for _ in range(3):
        reader.look()
    assert reader.asked == 1
    assert reader.sent == []


def test_an_end_that_a_killed_worker_did_not_tell_is_told(runtime: Runtime) -> None:
    """G2: no state stays STARTED. The worker is not shown as alive."""
    reader = Reader(runtime)
    reader.living["celery@other"] = Life(60.0, frozenset())
    for name, worker in (("good", "celery@one"), ("bad", "celery@one"), ("other", "celery@other")):
        add(runtime, name, "running", worker=worker)
        reader.worker_runs(name)
    end(runtime, "good", "succeeded", alive_until=None)
    end(runtime, "bad", "failed", error="ValueError", traceback="where", alive_until=None)
    end(runtime, "other", "succeeded", alive_until=None)
    reader.look()
    assert reader.sent == []  # it may have been slow to answer
    reader.look()
    assert (reader.task("good").state, reader.task("bad").state) == ("SUCCESS", "FAILURE")
    assert (reader.task("bad").exception, reader.task("bad").traceback) == ("ValueError", "where")
    assert reader.task("other").state == "STARTED"  # the living worker's own event is under way
    assert not reader.state.workers["celery@one"].alive
    reader.look()
    assert len(reader.sent) == 2


def test_an_end_before_the_worker_was_started_again_is_told(runtime: Runtime) -> None:
    """Under the same name, within seconds."""
    reader = Reader(runtime)
    add(runtime, "one", "running")
    reader.worker_runs("one")
    end(runtime, "one", "succeeded", ago_s=8)
    reader.living["celery@one"] = Life(4.0, frozenset())
    reader.look()
    assert reader.task("one").state == "SUCCESS"
    assert reader.state.workers["celery@one"].heartbeats  # not declared offline: it lives


def test_an_end_whose_hooks_still_run_is_not_told_yet(runtime: Runtime) -> None:
    """Celery's event comes after ``after_return``; a worker that is killed in it has told nothing."""
    reader = Reader(runtime)
    add(runtime, "one", "running")
    reader.worker_runs("one")
    end(runtime, "one", "succeeded", alive_until=None)
    reader.living["celery@one"] = Life(60.0, frozenset({"one"}))
    reader.look()
    reader.living.clear()
    reader.look()
    assert reader.sent == []
    reader.look()
    assert reader.task("one").state == "SUCCESS"


def test_a_worker_that_is_busy_is_not_taken_for_dead(runtime: Runtime) -> None:
    """A solo worker answers nothing while a body runs."""
    reader = Reader(runtime)
    reader.living["celery@other"] = Life(60.0, frozenset())
    for name, worker in (("one", "celery@solo"), ("next", "celery@solo"), ("other", "celery@other")):
        add(runtime, name, "running", worker=worker)
    end(runtime, "one", "succeeded")
    end(runtime, "other", "succeeded")
    for _ in range(4):
        reader.look()
    assert reader.sent == []


def test_where_nobody_ever_answers_nothing_is_told_from_that(runtime: Runtime) -> None:
    """Remote control may be forbidden. The first that answers, another worker too, shows that it is not."""
    reader = Reader(runtime)
    add(runtime, "one", "running")
    end(runtime, "one", "succeeded", alive_until=None)
    for _ in range(4):
        reader.look()
    assert reader.sent == []
    reader.living["celery@other"] = Life(1.0, frozenset())
    for _ in range(2):
        reader.look()
    assert reader.sent == [("task-succeeded", "one")]


def test_without_remote_control_nobody_is_asked(runtime: Runtime) -> None:
    reader = Reader(runtime, asks=False)
    add(runtime, "one", "running")
    end(runtime, "one", "succeeded")
    for _ in range(3):
        reader.look()
    assert (reader.asked, reader.sent) == (0, [])


def test_a_retry_that_was_told_late_does_not_stay(runtime: Runtime) -> None:
    """``task-retried`` takes the place of any state, also of the success that overtook it."""
    reader = Reader(runtime)
    add(runtime, "one", "running")
    reader.events.step()
    change(runtime, "one", state="retrying", attempt=2, worker_losses=1, due_at=now_ms())
    for kind in ("task-started", "task-succeeded"):
        reader.tell(kind, uuid="one", hostname="celery@two")
    reader.events.step()
    assert reader.task("one").state == "RETRY"
    end(runtime, "one", "succeeded", worker="celery@two")
    reader.events.step()
    assert reader.task("one").state == "SUCCESS"


def test_ends_are_told_of_more_operations_than_are_kept_in_view(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest of a long backlog run first, and are out of view by then; of every class of retention."""
    monkeypatch.setattr(events, "TRACKED_MAX", 2)
    reader = Reader(runtime)
    for number in range(6):
        add(runtime, f"op-{number}", "queued", retention_ms=(None, 60_000, 90_000)[number % 3])
    reader.events.step()
    assert len(reader.events._tracked) == 2
    add(runtime, "runs", "running")
    for number in range(6):
        end(runtime, f"op-{number}", "cancelled")
        reader.events.step()
    assert {reader.task(f"op-{number}").state for number in range(6)} == {"REVOKED"}


def test_a_dispatcher_that_starts_tells_what_ended_meanwhile(runtime: Runtime) -> None:
    add(runtime, "runs", "running")
    for name, ago_s in (("lately", 30.0), ("long-ago", 90.0)):
        add(runtime, name, "queued")
        end(runtime, name, "cancelled", ago_s=ago_s)
    reader = Reader(runtime)
    reader.events.step()
    assert reader.sent == [("task-revoked", "lately")]


def test_more_ends_than_a_batch_are_told_without_a_pause(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of the same millisecond."""
    monkeypatch.setattr(events, "BATCH", 3)
    reader = Reader(runtime)
    at = now_ms() - 2_000
    add(runtime, "runs", "running")
    for number in range(10):
        add(runtime, f"op-{number}", "queued")
        change(runtime, f"op-{number}", state="cancelled", ended_at=at)
    steps = 0
    while reader.events.step() is None:
        steps += 1
        assert steps < 10
    assert sorted(reader.sent) == [("task-revoked", f"op-{number}") for number in range(10)]


def test_a_broker_that_is_away_costs_nothing_and_is_caught_up_with(runtime: Runtime) -> None:
    reader = Reader(runtime)
    reader.broker_away = True
    add(runtime, "one", "queued")
    assert reader.events.step() == events.BROKER_AWAY_S
    reader.broker_away = False
    reader.events.step()
    assert reader.task("one").state == "PENDING"


def test_an_end_is_not_lost_with_the_broker(runtime: Runtime) -> None:
    """Neither a cancelled one, nor one that was found untold by its worker just before."""
    reader = Reader(runtime)
    add(runtime, "runs", "running")
    for name in ("one", "two"):
        add(runtime, name, "queued")
    reader.look()
    reader.living["celery@one"] = Life(1.0, frozenset())
    end(runtime, "one", "cancelled")
    end(runtime, "two", "succeeded", worker="celery@one", started_at=now_ms() - 9_000)
    reader.broker_away = True
    assert reader.look() == events.BROKER_AWAY_S
    reader.broker_away = False
    reader.living.clear()
    reader.events.step()
    assert (reader.task("one").state, reader.task("two").state) == ("REVOKED", "SUCCESS")


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
