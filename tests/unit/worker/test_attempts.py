"""Start, heartbeat and settle on real databases: who may write an operation's row, and what each write leaves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import update

from celery_durable.store.attempts import AlreadySettled, Ending
from tests.unit.worker.rows import Rows, attempt, message

DONE = Ending("application/json", "utf-8", b"42")
BROKEN = Ending("application/json", "utf-8", b"{}", "ValueError: no", "Traceback")


@pytest.fixture
def rows(database_url: str) -> Iterator[Rows]:
    rows = Rows.create(database_url)
    yield rows
    rows.database.dispose()


def start(rows: Rows, operation_id: str, number: int = 1, token: str = "token", timeout_ms: int = 30_000) -> bool:
    started = rows.attempts.start(attempt(operation_id, number, token), worker="w@h", timeout_ms=timeout_ms)
    return started is not None


def test_start_takes_the_admitted_attempt(rows: Rows) -> None:
    operation_id = rows.admit()
    assert start(rows, operation_id)
    row = rows.row(operation_id)
    assert (row.state, row.run_token, row.worker) == ("running", "token", "w@h")
    assert 29_000 < row.alive_until - row.started_at <= 30_000
    assert abs(rows.now() - row.started_at) < 5_000


def test_start_is_refused_to_another_token_and_granted_again_to_the_same(rows: Rows) -> None:
    """C5: the same message delivered twice starts once. A start whose answer was lost is repeated."""
    operation_id = rows.admit()
    assert start(rows, operation_id)
    assert not start(rows, operation_id, token="other")
    assert start(rows, operation_id)


@pytest.mark.parametrize("state", ["scheduled", "queued", "retrying", "succeeded", "failed", "cancelled"])
def test_start_is_refused_where_nothing_was_admitted(rows: Rows, state: str) -> None:
    assert not start(rows, rows.admit(state=state))


def test_start_is_refused_to_another_attempt_generation_or_id(rows: Rows) -> None:
    operation_id = rows.admit(attempt=2)
    assert not start(rows, operation_id, number=1)
    assert not start(rows, operation_id, number=3)
    assert not start(rows, "unknown")
    assert not start(rows, rows.admit(generation=2))


def test_start_is_refused_once_expired(rows: Rows) -> None:
    """D5, C17: expiry goes by the database's clock."""
    now = rows.now()
    assert not start(rows, rows.admit(expires_at=now - 1))
    assert start(rows, rows.admit(expires_at=now + 60_000))


def test_start_follows_the_policy(rows: Rows) -> None:
    operation_id = rows.admit(policy={"requeue_after_s": 3, "limit": None})
    started = rows.attempts.start(attempt(operation_id), worker="", timeout_ms=7_500)
    assert started is not None
    assert started.requeue_after_s == 3
    row = rows.row(operation_id)
    assert 7_000 < row.alive_until - row.started_at <= 7_500
    started = rows.attempts.start(attempt(rows.admit(policy={"requeue_after_s": None})), worker="", timeout_ms=1)
    assert started is not None
    assert started.requeue_after_s is None


def test_heartbeat_renews_only_its_own_token(rows: Rows) -> None:
    operation_id = rows.admit()
    start(rows, operation_id, timeout_ms=1_000)
    before = rows.row(operation_id).alive_until
    assert rows.attempts.beat(operation_id, "other", timeout_ms=60_000) is None
    assert rows.row(operation_id).alive_until == before
    beat = rows.attempts.beat(operation_id, "token", timeout_ms=60_000)
    assert beat is not None
    assert not beat.cancel_requested
    assert rows.row(operation_id).alive_until > before + 50_000


def test_heartbeat_tells_a_cancel_request_and_the_end(rows: Rows) -> None:
    operation_id = rows.admit()
    start(rows, operation_id)
    with rows.database.transaction() as connection:
        connection.execute(update(rows.tables.operations).values(cancel_requested_at=1))
    beat = rows.attempts.beat(operation_id, "token", timeout_ms=1_000)
    assert beat is not None
    assert beat.cancel_requested
    rows.attempts.succeed(attempt(operation_id), DONE)
    assert rows.attempts.beat(operation_id, "token", timeout_ms=1_000) is None


def test_success_ends_and_wakes_the_account(rows: Rows) -> None:
    operation_id = rows.admit(account="acme")
    start(rows, operation_id)
    assert rows.attempts.succeed(attempt(operation_id), DONE) == "succeeded"
    row = rows.row(operation_id)
    assert (row.state, row.result, row.result_content_type, row.alive_until) == (
        "succeeded", b"42", "application/json", None,
    )  # fmt: skip
    assert row.ended_at is not None
    assert rows.wakes() == ["acme"]
    assert rows.history(operation_id) == []


def test_an_operation_without_an_account_wakes_nobody(rows: Rows) -> None:
    operation_id = rows.admit()
    start(rows, operation_id)
    rows.attempts.succeed(attempt(operation_id), DONE)
    assert rows.wakes() == []


def test_failure_leaves_a_row_of_history(rows: Rows) -> None:
    operation_id = rows.admit(account="acme")
    start(rows, operation_id)
    assert rows.attempts.fail(attempt(operation_id), BROKEN) == "failed"
    row = rows.row(operation_id)
    assert (row.state, row.error, row.traceback, row.result) == ("failed", "ValueError: no", "Traceback", b"{}")
    (entry,) = rows.history(operation_id)
    assert (entry.outcome, entry.attempt, entry.worker, entry.run_token) == ("failed", 1, "w@h", "token")
    assert entry.started_at == row.started_at
    assert rows.wakes() == ["acme"]


def test_a_settle_may_be_repeated(rows: Rows) -> None:
    """C14: an answer that was lost is asked for again: nothing is written twice, and it is no refusal."""
    attempts = rows.attempts
    first, second, third = (rows.admit(account="acme") for _ in range(3))
    for operation_id in (first, second, third):
        start(rows, operation_id)
    for _ in range(2):
        assert attempts.succeed(attempt(first), DONE) == "succeeded"
        assert attempts.fail(attempt(second), BROKEN) == "failed"
        assert attempts.retry(attempt(third), message(third), BROKEN, requeue=False) == "retrying"
    assert [len(rows.history(each)) for each in (first, second, third)] == [0, 1, 1]
    assert rows.wakes() == ["acme", "acme"]
    assert rows.row(third).attempt == 2


def test_a_loss_is_counted_once(rows: Rows) -> None:
    """A23: by the worker or by a dispatcher, whoever comes first."""
    operation_id = rows.admit(account="acme")
    start(rows, operation_id)
    assert rows.lose(attempt(operation_id)) == "retrying"
    with pytest.raises(AlreadySettled) as refused:
        rows.lose(attempt(operation_id))
    assert refused.value.settled_as == "lost"
    assert (rows.row(operation_id).worker_losses, len(rows.history(operation_id)), rows.wakes()) == (1, 1, [])


def test_a_settle_is_refused_to_a_token_that_is_gone(rows: Rows) -> None:
    """A24, C3: a stale worker cannot settle, and so cannot free its successor's permit."""
    operation_id = rows.admit(account="acme")
    start(rows, operation_id)
    rows.lose(attempt(operation_id))
    with rows.database.transaction() as connection:
        connection.execute(update(rows.tables.operations).values(state="admitted"))
    start(rows, operation_id, number=2, token="successor")
    stale = attempt(operation_id)
    for settle in (
        lambda: rows.attempts.succeed(stale, DONE),
        lambda: rows.attempts.fail(stale, BROKEN),
        lambda: rows.attempts.cancel(stale, BROKEN),
        lambda: rows.attempts.retry(stale, message(operation_id), BROKEN, requeue=True),
        lambda: rows.attempts.repeat(stale, BROKEN),
    ):
        with pytest.raises(AlreadySettled) as refused:
            settle()
        assert refused.value.settled_as == "lost"
    assert rows.row(operation_id).run_token == "successor"
    assert rows.wakes() == []
    assert rows.payload(operation_id).body == b"[]"


def test_success_and_failure_of_one_attempt_exclude_each_other(rows: Rows) -> None:
    operation_id = rows.admit()
    start(rows, operation_id)
    rows.attempts.succeed(attempt(operation_id), DONE)
    with pytest.raises(AlreadySettled) as refused:
        rows.attempts.fail(attempt(operation_id), BROKEN)
    assert refused.value.settled_as == "succeeded"
    with pytest.raises(AlreadySettled) as refused:
        rows.lose(attempt(operation_id))
    assert refused.value.settled_as == "succeeded"


def test_retry_keeps_the_permit_and_takes_the_new_message(rows: Rows) -> None:
    operation_id = rows.admit(account="acme", sends=3, expires_at=None)
    start(rows, operation_id)
    again = message(operation_id, eta_delay_ms=9_000, expires_delay_ms=50_000)
    before = rows.now()
    assert rows.attempts.retry(attempt(operation_id), again, BROKEN, requeue=False) == "retrying"
    row = rows.row(operation_id)
    assert (row.state, row.attempt, row.retries, row.sends, row.run_token, row.alive_until) == (
        "retrying", 2, 1, 0, None, None,
    )  # fmt: skip
    assert (row.queue, row.priority, row.error, row.worker_losses) == ("other", 4, "ValueError: no", 0)
    after = rows.now()
    assert before <= row.due_at - 9_000 <= after
    assert before <= row.expires_at - 50_000 <= after
    payload = rows.payload(operation_id)
    assert (payload.body, payload.headers, payload.properties, payload.publish) == (
        b"new",
        {"a": 1},
        {"p": 2},
        {"q": 3},
    )
    assert [entry.outcome for entry in rows.history(operation_id)] == ["retried"]
    assert rows.wakes() == []


def test_a_long_retry_gives_the_permit_back(rows: Rows) -> None:
    operation_id = rows.admit(account="acme", admitted_at=1)
    start(rows, operation_id)
    due_at = rows.now() + 60_000
    again = message(operation_id, eta_delay_ms=1, eta_at_ms=due_at, expires_delay_ms=1, expires_at_ms=due_at + 1)
    assert rows.attempts.retry(attempt(operation_id), again, BROKEN, requeue=True) == "scheduled"
    row = rows.row(operation_id)
    assert (row.state, row.admitted_at, row.attempt, row.run_token) == ("scheduled", None, 2, None)
    assert (row.due_at, row.expires_at) == (due_at, due_at + 1)
    assert rows.wakes() == ["acme"]


def test_a_cancel_request_wins_over_running_again(rows: Rows) -> None:
    """A25: the cancel of a running one frees exactly its own permit, also if it would have been retried."""
    retried, repeated, lost = (rows.admit(account="acme", cancel_requested_at=1) for _ in range(3))
    for operation_id in (retried, repeated, lost):
        start(rows, operation_id)
    again = message(retried)
    assert rows.attempts.retry(attempt(retried), again, BROKEN, requeue=False) == "cancelled"
    assert rows.attempts.repeat(attempt(repeated), BROKEN) == "cancelled"
    assert rows.lose(attempt(lost)) == "cancelled"
    for operation_id in (retried, repeated, lost):
        row = rows.row(operation_id)
        assert (row.state, row.attempt, row.due_at, row.alive_until) == ("cancelled", 1, None, None)
        assert row.ended_at is not None
    assert rows.payload(retried).body == b"[]"
    assert rows.wakes() == ["acme"] * 3


def test_losses_are_counted_and_capped(rows: Rows) -> None:
    """C1, C11: apart from Celery's retries, by the policy's cap, or the setting's."""
    operation_id = rows.admit(policy={"max_worker_losses": 1})
    start(rows, operation_id)
    assert rows.lose(attempt(operation_id), losses_max=99) == "retrying"
    row = rows.row(operation_id)
    assert (row.attempt, row.retries, row.worker_losses, row.result) == (2, 0, 1, None)
    assert row.due_at <= rows.now()
    with rows.database.transaction() as connection:
        connection.execute(update(rows.tables.operations).values(state="admitted"))
    start(rows, operation_id, number=2)
    assert rows.lose(attempt(operation_id, 2), losses_max=99) == "failed"
    row = rows.row(operation_id)
    assert (row.state, row.attempt, row.worker_losses, row.result, row.due_at) == ("failed", 2, 2, b"{}", None)
    assert row.ended_at is not None
    assert [entry.outcome for entry in rows.history(operation_id)] == ["lost", "lost"]
    never = rows.admit()
    start(rows, never)
    assert rows.lose(attempt(never), losses_max=0) == "failed"


def test_a_stale_failure_is_not_taken_for_the_loss_that_failed_it(rows: Rows) -> None:
    """C3: the operation failed, but not by this body's exception: its settle is refused, and it is told as what."""
    operation_id = rows.admit()
    start(rows, operation_id)
    assert rows.lose(attempt(operation_id), losses_max=0) == "failed"
    with pytest.raises(AlreadySettled) as refused:
        rows.attempts.fail(attempt(operation_id), BROKEN)
    assert refused.value.settled_as == "failed"
    assert rows.row(operation_id).error.endswith("raise max_worker_losses")
    assert [entry.outcome for entry in rows.history(operation_id)] == ["lost"]


def test_revoke_ends_what_was_not_started_or_is_its_own(rows: Rows) -> None:
    waiting, running, foreign = (rows.admit(account="acme") for _ in range(3))
    start(rows, running)
    start(rows, foreign, token="other")
    assert rows.attempts.revoke(attempt(waiting), Ending(error="revoked")) == "cancelled"
    assert rows.attempts.revoke(attempt(running), Ending(error="revoked")) == "cancelled"
    with pytest.raises(AlreadySettled):
        rows.attempts.revoke(attempt(foreign), Ending(error="revoked"))
    assert [rows.row(each).state for each in (waiting, running, foreign)] == ["cancelled", "cancelled", "running"]
    assert rows.wakes() == ["acme", "acme"]


def test_a_deleted_operation_is_nobodys(rows: Rows) -> None:
    with pytest.raises(AlreadySettled) as refused:
        rows.attempts.succeed(attempt("gone"), DONE)
    assert refused.value.settled_as is None
