"""``ps``, ``why`` and ``accounts`` (case G1: which limit, how many before it, who holds the permits)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import insert

from celery_durable.errors import DurableError
from celery_durable.monitoring import inspect
from celery_durable.runtime import Runtime
from celery_durable.store.clock import now_ms
from tests.unit.monitoring.rows import add, add_account, make_runtime


@pytest.fixture
def runtime(database_url: str) -> Iterator[Runtime]:
    runtime = make_runtime(database_url)
    yield runtime
    runtime.database.dispose()


def full_account(runtime: Runtime) -> None:
    """An account at its limit of 3, of which this service holds 2."""
    add(runtime, "r1", "running")
    add(runtime, "r2", "retrying", attempt=2, due_ms=5_000)
    for number in range(3):
        add(runtime, f"q{number}", "queued")
    add(runtime, "urgent", "queued", priority=5)
    add(runtime, "other-group", "queued", group="g")
    add_account(runtime, "acme", blocked={"": "account_limit", "g": "group_limit"}, limit=3, in_use=3)


def test_ps_lists_what_has_not_ended_in_order(runtime: Runtime) -> None:
    full_account(runtime)
    add(runtime, "done", "succeeded", account=None)
    found = inspect.ps(runtime)
    assert [operation.id for operation in found] == ["r1", "r2", "q0", "q1", "q2", "urgent", "other-group"]
    running, retrying, queued = found[:3]
    assert (running.state, running.worker, running.attempt, running.why) == ("running", "celery@one", 1, "runs")
    assert running.state_s == pytest.approx(2, abs=2)
    assert running.age_s == pytest.approx(60, abs=2)
    assert retrying.why == "attempt 2 due in 5 s, keeps its permit"
    assert queued.why == "account limit"
    assert found[-1].why == "group limit"


def test_ps_narrows(runtime: Runtime) -> None:
    full_account(runtime)
    add(runtime, "elsewhere", "queued", account="globex")
    add(runtime, "done", "failed", error="ValueError: no\nmore lines")
    assert [each.id for each in inspect.ps(runtime, account="globex")] == ["elsewhere"]
    assert [each.why for each in inspect.ps(runtime, states=["failed"])] == ["ValueError: no"]
    assert len(inspect.ps(runtime, limit=2)) == 2
    with pytest.raises(DurableError, match="'waiting': there is no such state; use scheduled, queued"):
        inspect.ps(runtime, states=["waiting"])


def test_why_an_operation_is_queued(runtime: Runtime) -> None:
    """G1."""
    full_account(runtime)
    found = inspect.why(runtime, "q1")
    assert found.reason == "account_limit"
    assert found.before == 2  # "urgent" by its priority, and "q0"; not the other group's
    assert found.limit is not None
    assert (found.limit.limit, found.limit.in_use, found.limit.source) == (3, 3, "declared")
    assert (found.in_use, [each.id for each in found.permits_held_by]) == (2, ["r1", "r2"])
    assert found.summary == (
        "the limit of account 'acme' is reached (3 of 3 in use in all services, declared by the services' code); "
        "2 of its group come first"
    )
    assert inspect.why(runtime, "urgent").summary.endswith("; it is the first of its group")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("command", "set by a command: raise it with celery_durable.limits.set()"),
        ("rule tenant", "by the holder's rule 'tenant': raise it in HOLDER_LIMITS"),
        ("declared", "declared by the services' code: raise limit= there"),
    ],
)
def test_why_says_whose_word_a_limit_of_0_is(runtime: Runtime, source: str, says: str) -> None:
    """G1: "0 of 0 in use" looks like a fault of the counting."""
    add(runtime, "q", "queued")
    add_account(runtime, "acme", blocked={"": "account_limit"}, limit=0, in_use=0, source=source)
    summary = inspect.why(runtime, "q").summary
    assert summary.startswith(f"the limit of account 'acme' is 0, so nothing is admitted; it is {says}")
    assert inspect.ps(runtime)[0].why == "account limit is 0"


def test_why_before_anybody_has_answered(runtime: Runtime) -> None:
    """G1: what goes on and what to check, in words that need no source code."""
    add(runtime, "q", "queued")
    summary = inspect.why(runtime, "q").summary
    for part in ("has not asked the holder for a permit", "celery -A <app> durable dispatcher", "holder-service run"):
        assert part in summary


def test_why_says_what_a_grant_is_waiting_for(runtime: Runtime) -> None:
    add(runtime, "q", "queued")
    add_account(runtime, "acme", blocked={}, limit=3, in_use=3, offered=1)
    assert inspect.why(runtime, "q").summary.startswith("a permit is offered and is being claimed (3 of 3 in use")
    assert inspect.ps(runtime)[0].why == "a permit is being claimed for its group"


@pytest.mark.parametrize(
    ("state", "values", "why"),
    [
        ("scheduled", {"due_ms": 90_000}, "due in 90 s"),
        ("queued", {}, "waits for a dispatcher"),
        ("admitted", {"sends": 2, "due_ms": 5_000}, "sent to queue celery, no worker has started it"),
        ("admitted", {"sends": 0, "due_ms": 0}, "may run, not sent yet"),
        ("running", {"alive_ms": -1_000}, "its heartbeats are overdue"),
        ("running", {"cancel_requested_at": 1}, "asked to stop"),
        ("cancelled", {}, "cancelled"),
    ],
)
def test_why_in_each_state(runtime: Runtime, state: str, values: dict[str, int], why: str) -> None:
    add(runtime, "one", state, **values)
    states = () if state != "cancelled" else ("cancelled",)
    assert [each.why for each in inspect.ps(runtime, states=states)] == [why]


def test_why_without_an_account_and_with_a_history(runtime: Runtime) -> None:
    add(runtime, "alone", "running", account=None, attempt=2)
    attempts = runtime.tables.attempts
    with runtime.database.transaction() as connection:
        for generation, error in ((1, "of this generation"), (2, "of another")):
            connection.execute(
                insert(attempts).values(
                    operation_id="alone", generation=generation, attempt=1, outcome="lost", worker="celery@two",
                    ended_at=now_ms() - 3_000, error=error,
                )
            )  # fmt: skip
    found = inspect.why(runtime, "alone")
    assert (found.summary, found.limit, found.permits_held_by, found.in_use) == ("runs", None, [], 0)
    [attempt] = found.attempts
    assert (attempt.outcome, attempt.worker, attempt.error) == ("lost", "celery@two", "of this generation")
    assert attempt.ended_s == pytest.approx(3, abs=2)


def test_why_of_an_unknown_id(runtime: Runtime) -> None:
    with pytest.raises(inspect.OperationNotFound, match="operation 'nothing': none in this service's database"):
        inspect.why(runtime, "nothing")


def test_accounts(runtime: Runtime) -> None:
    full_account(runtime)
    add(runtime, "later", "scheduled", account="globex", due_ms=10_000)
    add_account(runtime, "leased", blocked={}, limit=9, in_use=2)
    acme, globex, leased = inspect.accounts(runtime)
    assert (acme.account, acme.limit, acme.source, acme.in_use_everywhere) == ("acme", 3, "declared", 3)
    assert (acme.in_use, acme.waiting, acme.scheduled) == (2, 5, 0)
    assert acme.oldest_wait_s == pytest.approx(60, abs=2)
    assert [(group.group, group.permits, group.in_use, group.waiting, group.reason) for group in acme.groups] == [
        ("", 2, 2, 4, "account_limit"),
        ("g", 0, 0, 1, "group_limit"),
    ]
    assert (globex.account, globex.limit, globex.scheduled, globex.oldest_wait_s) == ("globex", None, 1, None)
    assert (leased.account, leased.in_use, leased.groups[0].permits) == ("leased", 0, 2)


def test_a_group_s_limit_is_shown_as_far_as_this_service_knows_it(runtime: Runtime) -> None:
    add(runtime, "one", "queued", group="wf-7")
    add(runtime, "two", "queued")
    add_account(runtime, "acme", blocked={"wf-7": "group_limit"}, limit=9, in_use=2, group_limit=4)
    (acme,) = inspect.accounts(runtime)
    assert [(group.group, group.declared_limit) for group in acme.groups] == [("", None), ("wf-7", 4)]
