"""What a task class takes from the seam, without a worker."""

from __future__ import annotations

import signal
import sqlite3
from pathlib import Path
from typing import Any

import psycopg
import pytest
from celery import Celery
from celery.backends.base import DisabledBackend
from celery.exceptions import SoftTimeLimitExceeded
from sqlalchemy import func, select
from sqlalchemy.exc import OperationalError

from celery_durable import DurableTask, using
from celery_durable.errors import EnqueueError
from celery_durable.runtime import runtime_of
from celery_durable.scope import in_callers_transaction
from celery_durable.store.database import Database
from celery_durable.worker import abort, runs, tracer
from celery_durable.worker.retry import is_retry, stage_retry
from celery_durable.worker.runs import Run
from celery_durable.worker.transient import is_transient, persist
from tests.unit.worker.here import run_here
from tests.unit.worker.rows import attempt, message


def make_task(app: Celery, **options: Any) -> Any:
    """A durable task that retries once."""

    @app.task(base=DurableTask, bind=True, shared=False, max_retries=3, **options)
    def twice(self: Any, x: int) -> int:
        if self.request.retries == 0 and not self.request.called_directly:
            raise self.retry(countdown=0)
        return x * 2

    return twice


def rows(app: Celery) -> int:
    """How many operations there are."""
    runtime = runtime_of(app)
    with runtime.database.reading() as connection:
        return int(connection.execute(select(func.count()).select_from(runtime.tables.operations)).scalar_one())


def test_eager_and_direct_calls_write_no_rows(app: Celery) -> None:
    """D7: with retries too."""
    task = make_task(app)
    assert task(4) == 8
    assert task.apply((4,)).get() == 8
    app.conf.task_always_eager = True
    assert task.delay(4).get() == 8
    assert rows(app) == 0


def test_the_decorators_backend_is_where_to_forward_to(app: Celery) -> None:
    """It would shadow the property, and with it every settle."""
    target = DisabledBackend(app)
    task = make_task(app, backend=target)
    assert task.backend.forward_to is target
    assert type(task.backend).__name__ == "SettlingBackend"


def test_nothing_is_forwarded_to_a_backend_of_its_own_kind(app: Celery) -> None:
    app.conf.result_backend = "durable://"
    assert make_task(app).backend.forward_to is None


def test_every_tracer_of_celery_is_wrapped(app: Celery) -> None:
    task = make_task(app)
    assert task.__trace__ is None
    task.__trace__ = lambda *_: None
    assert type(task.__trace__).__name__ == "TracedAttempt"
    task.__trace__ = None
    assert task.__trace__ is None


def test_a_retry_is_staged_by_its_own_attempt_alone(app: Celery) -> None:
    task = make_task(app)
    run = Run(attempt("op"), in_child=False, retries=1, timeout_s=1, requeue_after_s=1)
    assert not is_retry(task, "op", 2)
    with pytest.raises(EnqueueError, match="not the attempt that runs now"):
        stage_retry(task, message("op"))
    runs.add(run)
    assert task.run_token is None
    task.push_request(id="op", durable_run={"token": "token", "pid": 0})
    try:
        assert task.run_token == "token"
        assert is_retry(task, "op", 2)
        assert not is_retry(task, "op", 1)
        assert not is_retry(task, "other", 2)
        with pytest.raises(EnqueueError, match="other"):
            stage_retry(task, message("other"))
        staged = message("op", retries=2)
        stage_retry(task, staged)
        assert run.staged is staged
    finally:
        task.pop_request()
        runs.remove(run)
    assert not is_retry(task, "op", 2)


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (sqlite3.OperationalError("database is locked"), True),
        (sqlite3.OperationalError("no such table: x"), False),
        (sqlite3.IntegrityError("locked"), False),
        (psycopg.OperationalError("connection refused"), True),
        (psycopg.errors.AdminShutdown("terminating"), True),
        (psycopg.InterfaceError("the connection is closed"), True),
        (psycopg.errors.UndefinedTable("no table"), False),
        (OperationalError("x", {}, sqlite3.OperationalError("database is locked")), True),
        (OperationalError("x", {}, sqlite3.OperationalError("no such table: x")), False),
        (ValueError("x"), False),
    ],
)
def test_which_errors_pass(error: Exception, passing: bool) -> None:
    assert is_transient(error) is passing


def test_patience(tmp_path: Path) -> None:
    """C14: passing errors are waited out, others and too many are raised."""
    database = Database(f"sqlite:///{tmp_path / 'db.sqlite3'}")
    errors: list[Exception] = [sqlite3.OperationalError("database is locked")] * 3

    def action() -> str:
        if errors:
            raise errors.pop()
        return "done"

    assert persist(database, action, patience_s=10, what="it") == "done"
    errors.append(ValueError("wrong"))
    with pytest.raises(ValueError, match="wrong"):
        persist(database, action, patience_s=10, what="it")
    errors.extend([sqlite3.OperationalError("database is locked")] * 1_000)
    with pytest.raises(sqlite3.OperationalError):
        persist(database, action, patience_s=0.1, what="it")
    database.dispose()


def test_a_using_that_the_body_did_not_leave_ends_with_it(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    """Neither its links nor later tasks of the thread go into a transaction that nobody commits."""
    kept: list[Any] = []
    runtime = runtime_of(app)
    caller = runtime.database.engine.connect()

    @app.task(base=DurableTask, bind=True, shared=False)
    def careless(self: Any) -> None:
        kept.append(using(caller))
        kept[0].__enter__()

    following = make_task(app)
    operation = run_here(careless, callbacks=[following.si(1)])
    assert not in_callers_transaction()
    assert operation.state == "SUCCESS"
    caller.rollback()
    caller.close()
    assert rows(app) == 2
    assert caplog.text.count("did not leave it") == 1
    kept[0].__exit__(None, None, None)
    assert not in_callers_transaction()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_soft_time_limit_that_comes_just_before_the_body_counts(
    app: Celery, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """C15: a busy machine is slow to begin; the limit comes once, and a body without one would go on for ever."""

    @app.task(base=DurableTask, shared=False)
    def endless() -> str:
        return "not stopped"

    def pool_handler(_number: int, _frame: object) -> None:
        raise SoftTimeLimitExceeded

    def add(run: Run) -> None:
        if when == "before":
            signal.raise_signal(signal.SIGUSR1)
        known(run)
        signal.raise_signal(signal.SIGUSR1)

    known = runs.add
    monkeypatch.setattr(runs, "add", add)
    present = signal.signal(signal.SIGUSR1, pool_handler)
    try:
        abort.enter_body(Run(attempt("earlier"), in_child=True, retries=0, timeout_s=1, requeue_after_s=30))
        operation = run_here(endless)
    finally:
        signal.signal(signal.SIGUSR1, present)
    assert operation.state == "FAILURE"
    assert isinstance(operation.result, SoftTimeLimitExceeded)


def test_a_body_whose_time_was_over_before_it_began_does_not_run(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """C3: a worker that was frozen between the start in SQL and the body: its successor may have run since."""
    ran: list[str] = []

    @app.task(base=DurableTask, shared=False)
    def late() -> None:
        ran.append("late")

    begin = tracer.start

    def begin_and_freeze(task: Any, request: dict[str, Any]) -> tuple[Run, float]:
        run, begun = begin(task, request)
        return run, begun - run.timeout_s

    monkeypatch.setattr(tracer, "start", begin_and_freeze)
    operation = run_here(late)
    assert not ran
    operations = runtime_of(app).tables.operations
    with runtime_of(app).database.reading() as connection:
        row = connection.execute(select(operations).where(operations.c.id == operation.id)).one()
    assert (row.state, row.attempt, row.worker_losses) == ("retrying", 2, 1)
