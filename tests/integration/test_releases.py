"""What frees a permit and what does not, seen from the queue behind it, on real databases (cases A22 to A26).

One account with one permit: an operation holds it, another waits. Only a true release lets the second one in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from celery import Celery

from celery_durable import DuplicateOperationError, DurableTask
from celery_durable.runtime import runtime_of
from celery_durable.store.accounts import wake
from celery_durable.store.attempts import AlreadySettled, Attempt, Attempts, Ending
from celery_durable.store.clock import now_ms
from tests.dispatching import CLIENT_ID, Service, steps
from tests.unit.worker.rows import message

DONE = Ending("application/json", "utf-8", b"1")
BROKEN = Ending("application/json", "utf-8", b"{}", "ValueError: no", "Traceback")


@dataclass
class Account:
    """The service, its worker's statements, and an app whose task has the account."""

    service: Service
    attempts: Attempts
    app: Celery
    charge: DurableTask[..., int]

    def start(self, operation_id: str, number: int = 1, token: str = "first") -> Attempt:
        """A worker starts the attempt."""
        attempt = Attempt(operation_id, 1, number, token)
        assert self.attempts.start(attempt, worker="w", timeout_ms=60_000) is not None
        return attempt

    def overdue(self, operation_id: str) -> None:
        """The worker's heartbeats are over."""
        self.service.change(operation_id, alive_until=now_ms() - 1)

    def let_in(self) -> list[str]:
        """Runs recovery and passes to their rest, whether or not anybody asked. Returns what holds a permit."""
        steps(self.service.recovery().step)
        with self.service.database.transaction() as connection:
            wake(connection, self.service.tables, ["acme"])
        self.service.run_passes()
        return self.service.ids("admitted", "running", "retrying")


@pytest.fixture
def account(database_url: str) -> Iterator[Account]:
    service = Service(database_url, max_worker_losses=1)
    app = Celery("billing", broker="memory://", set_as_current=False)
    app.conf.durable = {"client_id": CLIENT_ID, "database_url": database_url}

    @app.task(base=DurableTask, shared=False, name="charge", account="{account}", lazy=False)
    def charge(account: str, amount: int = 1) -> int:
        return amount

    for operation_id in ("holds", "waits", "waits too"):
        charge.apply_async(("acme",), task_id=operation_id)
    service.run_passes()
    service.lease(1)
    assert service.ids("admitted") == ["holds"]
    yield Account(service, Attempts(service.database, service.tables), app, charge)
    runtime_of(app).database.dispose()
    app.close()
    service.close()


def test_the_permit_of_a_worker_that_died_is_free_when_its_attempts_are_over(account: Account) -> None:
    """A22: not while heartbeats may still come, not while the operation runs again; but when it has ended."""
    account.start("holds")
    assert account.let_in() == ["holds"]
    account.overdue("holds")
    assert account.let_in() == ["holds"]
    assert account.service.row("holds").attempt == 2
    account.start("holds", 2, "second")
    assert account.let_in() == ["holds"]
    account.overdue("holds")
    assert account.let_in() == ["waits"]
    assert account.service.row("holds").state == "failed"


def test_a_release_may_come_twice(account: Account) -> None:
    """A23: the settle repeated, another settle after it, its wake repeated: the permit is given on once."""
    service, attempt = account.service, account.start("holds")
    for _ in range(2):
        assert account.attempts.succeed(attempt, DONE) == "succeeded"
    assert account.let_in() == ["waits"]
    assert account.attempts.succeed(attempt, DONE) == "succeeded"
    with pytest.raises(AlreadySettled):
        account.attempts.fail(attempt, BROKEN)
    for _ in range(3):
        assert account.let_in() == ["waits"]
    assert service.row("waits too").state == "queued"


def test_a_loss_that_two_dispatchers_find_is_one(account: Account) -> None:
    """A23: the permit of the operation that failed for it goes to the next one, and not to the one after."""
    account.service.change("holds", worker_losses=1)
    account.start("holds")
    account.overdue("holds")
    others = [account.service.again() for _ in range(2)]
    for other in others:
        steps(other.recovery().step)
        other.run_passes()
    assert account.let_in() == ["waits"]
    assert account.service.row("holds").worker_losses == 2


def test_a_stale_worker_frees_nothing_of_its_successor(account: Account) -> None:
    """A24: whatever it settles, and also if it cancels: the permit is its successor's, who gives it back."""
    stale = account.start("holds")
    account.overdue("holds")
    assert account.let_in() == ["holds"]
    successor = account.start("holds", 2, "second")
    attempts = account.attempts
    for settle in (
        lambda: attempts.succeed(stale, DONE),
        lambda: attempts.fail(stale, BROKEN),
        lambda: attempts.cancel(stale, BROKEN),
        lambda: attempts.revoke(stale, BROKEN),
        lambda: attempts.retry(stale, message("holds"), BROKEN, requeue=True),
        lambda: attempts.repeat(stale, BROKEN),
    ):
        with pytest.raises(AlreadySettled):
            settle()
        assert account.let_in() == ["holds"]
        assert account.service.row("holds").run_token == "second"
    assert attempts.succeed(successor, DONE) == "succeeded"
    assert account.let_in() == ["waits"]


def test_cancelling_what_waits_frees_nothing(account: Account) -> None:
    """A25: the one that runs and the one behind it are as they were."""
    account.start("holds")
    before = [account.service.row(each) for each in ("holds", "waits too")]
    assert account.charge.AsyncResult("waits").cancel() == "cancelled"
    assert account.let_in() == ["holds"]
    assert [account.service.row(each) for each in ("holds", "waits too")] == before
    assert account.service.row("waits").state == "cancelled"


def test_cancelling_what_runs_frees_its_own_permit_when_it_has_stopped(account: Account) -> None:
    """A25: the request frees nothing; the worker that obeys it does, once, and for the next in line."""
    attempt = account.start("holds")
    result = account.charge.AsyncResult("holds")
    assert result.cancel() == "requested"
    assert account.let_in() == ["holds"]
    assert account.attempts.cancel(attempt, BROKEN) == "cancelled"
    assert result.cancel() == "ended"
    assert account.let_in() == ["waits"]


@pytest.mark.parametrize("state", ["admitted", "running", "retrying", "succeeded"])
def test_a_duplicate_frees_nothing_of_the_original(account: Account, state: str) -> None:
    """A26: the call comes again, or with another body and is refused; the message comes again, or as a revoked one."""
    service = account.service
    original = account.start("holds") if state != "admitted" else Attempt("holds", 1, 1, "first")
    if state == "retrying":
        account.attempts.retry(original, message("holds", eta_delay_ms=60_000), BROKEN, requeue=False)
    if state == "succeeded":
        account.attempts.succeed(original, DONE)
    holds = account.let_in()
    assert holds == (["waits"] if state == "succeeded" else ["holds"])
    before, wakes = service.row("holds"), service.count("wakes")
    again = account.charge.apply_async(("acme",), task_id="holds")
    assert again.duplicate
    assert account.charge.enqueue_many([account.charge.s("acme").set(task_id="holds")]).duplicates == ("holds",)
    with pytest.raises(DuplicateOperationError):
        account.charge.apply_async(("acme", 2), task_id="holds")
    if state != "admitted":
        copy = Attempt("holds", 1, 1, "another")
        assert account.attempts.start(copy, worker="w", timeout_ms=60_000) is None
        with pytest.raises(AlreadySettled):
            account.attempts.revoke(copy, BROKEN)
    assert (service.row("holds"), service.count("wakes")) == (before, wakes)
    assert account.let_in() == holds
