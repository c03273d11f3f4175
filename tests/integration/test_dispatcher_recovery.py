"""Recovery of what is overdue, and retention, on real databases."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import WorkerLostError
from sqlalchemy import select, update

from celery_durable.outcomes import Encoded, decode_result
from celery_durable.store.clock import now_ms
from tests.dispatching import Service, steps

HOUR_MS = 3_600_000


@pytest.fixture
def service(database_url: str) -> Iterator[Service]:
    service = Service(database_url, max_worker_losses=2, retention_s=60.0)
    yield service
    service.close()


def running(service: Service, operation_id: str, alive_ms: int = -1, **columns: Any) -> None:
    """An operation whose heartbeats are over in ``alive_ms``."""
    service.add(operation_id, wakes=False, **{"state": "running", "run_token": "r1", "worker": "w1", **columns})
    service.change(operation_id, alive_until=now_ms() + alive_ms)


def history(service: Service) -> list[Any]:
    with service.database.reading() as connection:
        return list(connection.execute(select(service.tables.attempts)))


def test_a_lost_attempt_is_counted_and_runs_again_with_its_permit(service: Service) -> None:
    """C1, A22: the attempt is over once its heartbeats are; the permit stays with the operation."""
    running(service, "op", attempt=3, started_at=5)
    admitted: list[bool] = []
    steps(service.recovery(on_admitted=lambda: admitted.append(True)).step)
    row = service.row("op")
    assert (row.state, row.attempt, row.worker_losses, row.sends) == ("admitted", 4, 1, 0)
    assert (row.run_token, row.alive_until, row.ended_at) == (None, None, None)
    assert row.due_at is not None
    (lost,) = history(service)
    assert (lost.operation_id, lost.attempt, lost.outcome, lost.worker, lost.run_token, lost.started_at) == (
        ("op", 3, "lost", "w1", "r1", 5)
    )
    assert admitted
    assert service.count("wakes") == 0
    assert service.in_use() == 1


def test_an_operation_that_loses_too_many_workers_fails_and_says_so(service: Service) -> None:
    """C1: killed every time, it ends as failed after the cap, and its permit goes back."""
    running(service, "op", worker_losses=2)
    woken: list[bool] = []
    steps(service.recovery(on_wakes=lambda: woken.append(True)).step)
    row = service.row("op")
    assert (row.state, row.worker_losses, row.due_at, row.alive_until) == ("failed", 3, None, None)
    assert row.ended_at is not None
    assert "WorkerLostError: " in row.error
    assert "max_worker_losses = 2" in row.error
    assert "w1" in row.error
    assert service.count("wakes") == 1
    assert woken
    encoded = Encoded(row.result_content_type, row.result_content_encoding, row.result)
    error = decode_result(Celery(set_as_current=False), encoded, failed=True)
    assert isinstance(error, WorkerLostError)
    assert str(error) in row.error


def test_many_attempts_are_lost_at_once(service: Service) -> None:
    """A host that dies takes many with it."""
    for n in range(5):
        running(service, f"op{n}", worker_losses=n % 3)
    steps(service.recovery().step)
    assert service.ids("admitted") == ["op0", "op1", "op3", "op4"]
    assert service.ids("failed") == ["op2"]
    assert len(history(service)) == 5


@pytest.mark.parametrize(("own", "state"), [(0, "failed"), (5, "admitted")])
def test_a_task_has_a_cap_of_its_own(service: Service, own: int, state: str) -> None:
    running(service, "op", worker_losses=own and 2, policy={"max_worker_losses": own})
    steps(service.recovery().step)
    assert service.row("op").state == state


def test_a_lost_attempt_that_was_to_be_cancelled_is_cancelled(service: Service) -> None:
    running(service, "op", cancel_requested_at=1)
    steps(service.recovery().step)
    assert service.row("op").state == "cancelled"
    assert service.count("wakes") == 1


def test_times_follow_the_clock_of_the_database(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """C17: a host an hour ahead ends no attempt and starts nothing early."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3_600)
    running(service, "op", alive_ms=600_000)
    service.add("later", state="scheduled", wakes=False)
    service.change("later", due_at=now_ms() + 600_000)
    due_s = service.recovery().step()
    assert due_s is not None
    assert 590 < due_s <= 600
    assert service.row("op").state == "running"
    assert service.row("later").state == "scheduled"


def test_a_retry_that_is_due_is_admitted_without_asking(service: Service) -> None:
    """A13: running work's retries go on, whatever the account's pause."""
    service.add("op", state="retrying", due_at=1, attempt=2, wakes=False, admitted_at=7)
    steps(service.recovery().step)
    row = service.row("op")
    assert (row.state, row.attempt) == ("admitted", 2)
    assert service.count("wakes") == 0


def test_what_is_due_queues_in_its_old_place(service: Service) -> None:
    service.add("first", state="scheduled", due_at=1, wakes=False)
    service.add("second", wakes=False)
    service.add("free", state="scheduled", due_at=1, account=None, wakes=False)
    woken: list[bool] = []
    admitted: list[bool] = []
    recovery = service.recovery(on_wakes=lambda: woken.append(True), on_admitted=lambda: admitted.append(True))
    steps(recovery.step)
    assert service.ids("queued") == ["first", "second"]
    assert service.ids("admitted") == ["free"]
    assert service.row("first").due_at is None
    assert service.row("free").due_at is not None
    assert service.count("wakes") == 1
    assert (woken, admitted) == ([True], [True])


@pytest.mark.parametrize("state", ["scheduled", "queued", "admitted", "retrying"])
def test_what_expired_is_cancelled_and_gives_back(service: Service, state: str) -> None:
    """D5: an operation that expired before it started is cancelled; the account is told."""
    service.add("op", state=state, expires_at=1, due_at=HOUR_MS * 10**6, wakes=False)
    steps(service.recovery().step)
    row = service.row("op")
    assert (row.state, row.error) == ("cancelled", "expired before an attempt started")
    assert row.ended_at is not None
    assert service.count("wakes") == 1


def test_a_running_attempt_does_not_expire(service: Service) -> None:
    running(service, "op", alive_ms=600_000, expires_at=1)
    steps(service.recovery().step)
    assert service.row("op").state == "running"


def test_what_was_asked_to_stop_between_attempts_does_not_run_again(service: Service) -> None:
    service.add("op", state="retrying", due_at=1, cancel_requested_at=1, wakes=False)
    steps(service.recovery().step)
    assert service.row("op").state == "cancelled"
    assert service.count("wakes") == 1


@pytest.mark.postgresql
def test_a_row_that_someone_holds_is_left_for_later(postgresql_url: str) -> None:
    """SKIP LOCKED: a user's open transaction on one row holds back no other, and recovery does not wait or spin."""
    service = Service(postgresql_url)
    running(service, "held")
    running(service, "other")
    operations = service.tables.operations
    with service.database.transaction() as connection:
        connection.execute(update(operations).where(operations.c.id == "held").values(cancel_requested_at=now_ms()))
        steps(service.again().recovery().step)
        assert service.row("other").state == "admitted"
        assert service.row("held").state == "running"
    steps(service.recovery().step)
    assert service.row("held").state == "cancelled"
    service.close()


def test_retention_deletes_what_was_kept_long_enough(service: Service) -> None:
    """F3: with payload and history, in batches, by the operation's own retention where it has one."""
    kept = {"state": "succeeded", "wakes": False}
    service.add("old", **kept)
    service.add("new", **kept)
    service.add("short", retention_ms=1_000, **kept)
    service.add("long", retention_ms=HOUR_MS, **kept)
    service.add("live", state="running", wakes=False)
    for operation_id, ago_ms in (("old", 61_000), ("new", 5_000), ("short", 5_000), ("long", 61_000), ("live", 10**9)):
        service.change(operation_id, ended_at=now_ms() - ago_ms)
    with service.database.transaction() as connection:
        rows = [
            {"operation_id": one, "generation": 1, "attempt": 1, "outcome": "lost", "ended_at": 1}
            for one in ("old", "long")
        ]
        connection.execute(service.tables.attempts.insert(), rows)
    steps(service.retention().step)
    assert service.ids("succeeded", "running") == ["new", "long", "live"]
    assert service.count("payloads") == 3
    assert [row.operation_id for row in history(service)] == ["long"]


@pytest.mark.postgresql
def test_retention_never_deletes_a_row_that_went_live_again(postgresql_url: str) -> None:
    """F3: a retry by hand that is not committed yet keeps its row."""
    service = Service(postgresql_url, retention_s=1.0)
    service.add("op", state="failed", ended_at=1, wakes=False)
    with service.database.transaction() as connection:
        operations = service.tables.operations
        connection.execute(update(operations).where(operations.c.id == "op").values(state="queued", generation=2))
        steps(service.again().retention().step)
    steps(service.retention().step)
    assert service.row("op").state == "queued"
    service.close()


def test_what_queues_again_declares_its_limits_again(service: Service) -> None:
    """E6: an account whose operations all wait for their time keeps no row; what its code declares, a mutex above all,
    must be in force again before the first of them is admitted."""
    limits = {"op": {"limit": 1, "mutex": True}, "other": {"limit": 5, "group_limit": 2}, "plain": {}}
    for operation_id, policy in limits.items():
        service.add(operation_id, state="scheduled", due_at=1, policy=policy, wakes=False)
    steps(service.recovery().step)
    assert service.ids("queued") == ["op", "other", "plain"]
    service.run_passes()
    report = service.report()
    assert report is not None
    assert (report.declared.limit, report.declared.group_limit, report.declared.mutex) == (1, 2, True)
