"""An account whose pass fails, in a batch with others: it fails alone."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import case, update

from celery_durable.dispatcher import passes as passes_module
from celery_durable.permits.messages import ReplyGroup
from celery_durable.store import outbox
from tests.dispatching import Service
from tests.harness import wait_until


def fail_passes_of(monkeypatch: pytest.MonkeyPatch, account: str) -> None:
    """Has every pass of the account fail."""
    real = passes_module.plan

    def failing(state: Any, *arguments: Any, **options: Any) -> Any:
        if state.account == account:
            raise ValueError("no such thing")
        return real(state, *arguments, **options)

    monkeypatch.setattr(passes_module, "plan", failing)


def test_one_failing_account_stops_no_other(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """F5: it fails alone, is said, and is tried again later."""
    fail_passes_of(monkeypatch, "bad")
    for account in ("apple", "bad", "zebra"):
        service.add(account, account=account)
    passes = service.passes()
    with caplog.at_level(logging.ERROR):
        service.run_passes(passes)
    assert service.report("apple") is not None
    assert service.report("zebra") is not None
    assert service.report("bad") is None
    assert "account 'bad': its pass failed: ValueError: no such thing" in caplog.text
    pause_s = passes.step()
    assert pause_s is not None
    assert 0 < pause_s <= 1.0
    monkeypatch.undo()
    wait_until(lambda: (passes.step(), service.report("bad"))[1], what="its next try")


def test_a_failed_account_that_needs_no_pass_any_more_is_forgotten(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop must not spin for its sake."""
    monkeypatch.setattr(passes_module, "plan", lambda *_, **__: 1 / 0)
    service.add("op")
    passes = service.passes()
    pause_s = passes.step()
    assert pause_s is not None
    with service.database.transaction() as connection:
        connection.execute(service.tables.wakes.delete())
    wait_until(lambda: passes.step() == float("inf"), what="it is forgotten")


@pytest.mark.parametrize("found_by", ["wake", "due"])
def test_many_failing_accounts_stop_no_other(database_url: str, monkeypatch: pytest.MonkeyPatch, found_by: str) -> None:
    """F5: more of them than one batch has room for, and all longer overdue."""
    service = Service(database_url, pass_accounts_max=2)
    passes, bad = service.passes(), [f"bad{number}" for number in range(5)]
    for account in (*bad, "zebra"):
        service.add(account, account=account)
    service.run_passes(passes)
    service.sent("zebra")
    real = passes_module.plan
    monkeypatch.setattr(
        passes_module,
        "plan",
        lambda state, *rest, **more: 1 / (state.account == "zebra") and real(state, *rest, **more),
    )
    for account in (*bad, "zebra"):
        service.add(f"{account} again", account=account, wakes=found_by == "wake")
    accounts = service.tables.accounts
    with service.database.transaction() as connection:
        due_at = case((accounts.c.account == "zebra", 2), else_=1)
        connection.execute(update(accounts).values(due_at=due_at if found_by == "due" else None))
    wait_until(lambda: (passes.step(), service.report("zebra"))[1], 10, what="another account's report")
    service.close()


def test_one_failing_reply_stops_no_other(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """B13, for replies: the holder repeats what was not acknowledged."""
    for account in ("apple", "bad", "zebra"):
        service.add(account, account=account)
    service.run_passes()
    fail_passes_of(monkeypatch, "bad")
    service.apply(*(service.reply(ReplyGroup(permits=1), account=one) for one in ("apple", "bad", "zebra")))
    assert service.ids("admitted") == ["apple", "zebra"]


def test_a_poisoned_reply_makes_no_deadlock(postgresql: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """B13: accounts that are done one by one, since one of them fails, keep the locks of all: another dispatcher that
    came between would wait for the counter of reports while this one waits for its account."""
    service, other = postgresql, postgresql.again()
    for account in ("apple", "bad", "zebra"):
        service.add(account, account=account)
    service.run_passes()
    fail_passes_of(monkeypatch, "bad")
    replies = [service.reply(ReplyGroup(permits=1), account=one, ack_wanted=True) for one in ("apple", "bad", "zebra")]
    late = other.reply(ReplyGroup(permits=1), account="zebra", ack_wanted=True, version=1_000)
    real = outbox.stage
    with ThreadPoolExecutor(1) as threads:
        applying: list[Future[None]] = []

        def between(connection: Any, table: Any, staged: Any) -> None:
            real(connection, table, staged)
            if [one.key for one in staged] == ["apple"] and not applying:
                applying.append(threads.submit(other.apply, late))
                wait_until(lambda: service.waiting_for_locks() > 0, what="the other dispatcher waits")

        monkeypatch.setattr(outbox, "stage", between)
        service.apply(*replies)
        applying[0].result(20)
    assert service.ids("admitted") == ["apple", "zebra"]
