"""Limits and accounts as users declare, change and name them: two services under one holder."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from sqlalchemy.orm import Session

import celery_durable
from celery_durable import EnqueueError, limits, pause, resume
from celery_durable.monitoring import inspect
from celery_durable.runtime import runtime_of
from tests.e2e.observe import (
    History,
    all_read,
    forgotten,
    holder_usage,
    operation,
    outbox_depth,
    reports,
    rows,
    states,
    wait_ended,
)
from tests.harness import Service, Stack, wait_until

pytestmark = pytest.mark.processes

RULES = {"limits": {"ruled": 5, "grouped": 4}}
SHAPES = (
    "1",
    "1:2",
    "a" * 1024,
    "żółw-日本-🦀",
    'it\'s "quoted" `here`',
    " spaces  and\ttab ",
    "Case",
    "case",
    "CASE",
    "%s {0} \\ ; DROP TABLE x; --",
    "null",
)


SLOW_MACHINE_S = 4.0
"""A second is promised on an idle machine; it must not be a repeat or a lifetime of many seconds that found it."""


@dataclass
class Running:
    """Two services with a dispatcher and a worker each."""

    stack: Stack
    billing: Service
    crm: Service


@pytest.fixture(scope="module")
def running(module_stack: Stack) -> Running:
    services = [module_stack.service("billing", idle_return_s=1.0), module_stack.service("crm", idle_return_s=1.0)]
    module_stack.holder(**RULES)
    for service in services:
        service.dispatcher()
        service.worker(concurrency=4)
    return Running(module_stack, *services)


@pytest.fixture
def billing(running: Running) -> Service:
    return running.billing


def running_now(service: Service, account: str) -> int:
    """How many bodies of the account run, by the records."""
    events = [record.event for record in service.records() if record.account == account]
    return events.count("start") - events.count("end")


def shown(service: Service, account: str) -> inspect.Account | None:
    """What ``durable accounts`` shows of the account."""
    return next((each for each in inspect.accounts(runtime_of(service.app)) if each.account == account), None)


def limit_seen(service: Service, account: str) -> tuple[int | None, str | None]:
    """The limit that the service's people see, and where it comes from."""
    found = shown(service, account)
    return (found.limit, found.source) if found else (None, None)


def refused(service: Service, account: str) -> list[tuple[str, int]]:
    """Groups that wait although the holder has answered, and how many operations of each."""
    found = shown(service, account)
    return [(each.group, each.waiting) for each in found.groups if each.reason == "account_limit"] if found else []


def in_transaction(service: Service, act: Callable[[], object], *, commit: bool) -> None:
    """Does it in a transaction of the caller's own."""
    with Session(runtime_of(service.app).database.engine) as session:
        with celery_durable.using(session):
            act()
        if commit:
            session.commit()
        else:
            session.rollback()


def test_without_a_declared_limit_it_is_one(billing: Service) -> None:
    """Case E1: no limit declared: 1."""
    account = "tenant:undeclared"
    for _ in range(8):
        billing.task("single").delay(account, 0.03)
    wait_ended(billing, account, 8)
    History([billing]).check_bound(1, account=account)


def test_a_rule_or_command_cannot_loosen_a_mutex(running: Running) -> None:
    """Case E1: a rule for a name, or a command, does not make a mutex of that name more than 1."""
    service, account = running.billing, "ruled:mutex"
    limits.set(account, 7, app=service.app)
    for _ in range(8):
        service.task("exclusive").delay(account, 0.03)
    for _ in range(3):
        service.task("single").delay("ruled:free", 0.3)
    wait_ended(service, account, 8)
    wait_ended(service, "ruled:free", 3)
    history = History([service])
    history.check_bound(1, account=account)
    history.check_bound(5, account="ruled:free")
    told = f"'{account}': limit 7 from command is ignored"
    wait_until(lambda: told in running.stack.logs(), 30, what="the holder's word of it")


def test_the_smaller_of_two_declared_limits_holds(running: Running) -> None:
    """Case E2: two services declare different limits: the smaller holds, and both can see why."""
    account = "tenant:disputed"
    services = [running.billing, running.crm]
    held = [
        service.task("limited").delay(account, limit, 1.0)
        for service, limit in zip(services, (5, 2), strict=True)
        for _ in range(4)
    ]
    seen: set[str] = set()

    def all_seen() -> bool:
        # Not all at one moment: who has nothing left there forgets the account.
        seen.update(service.name for service in services if limit_seen(service, account) == (2, "declared"))
        why = inspect.why(runtime_of(running.billing.app), held[0].id).limit
        if why is not None and (why.limit, why.source) == (2, "declared"):
            seen.add("why")
        return seen == {"billing", "crm", "why"}

    wait_until(all_seen, 30, what="both see it, and why")
    for service in services:
        wait_ended(service, account, 4)
    second_known = min(record.time_ns for record in running.crm.records() if record.account == account)
    # What the larger declaration let start before the smaller was heard of is not revoked.
    History(services).check_bound(2, account=account, since_ns=second_known)


def test_a_limit_that_was_rolled_back_changes_nothing(billing: Service) -> None:
    """Case E3: SetLimit, in a transaction that rolls back, changes nothing; committed, it holds."""
    account, task = "tenant:commanded", billing.task("single")
    wait_until(lambda: all_read(billing), what="quiet")
    in_transaction(billing, lambda: limits.set(account, 3, app=billing.app), commit=False)
    assert not outbox_depth(billing)
    for _ in range(5):
        task.delay(account, 0.05)
    wait_ended(billing, account, 5)
    History([billing]).check_bound(1, account=account)

    in_transaction(billing, lambda: limits.set(account, 3, app=billing.app), commit=True)
    slow = [task.delay(account, 1.0) for _ in range(5)]
    wait_until(lambda: running_now(billing, account) == 3, 30, what="three at once")
    for result in slow:
        result.get(timeout=60)
    History([billing]).check_bound(3, account=account)


def test_the_account_is_computed_once(billing: Service) -> None:
    """Case E4: what its arguments' source says later, or elsewhere, changes nothing, in a retry neither."""
    directory = billing.app.conf.directory
    directory["ann"] = "tenant:first"
    result = billing.task("looked_up").delay("ann", 2)
    directory["ann"] = "tenant:second"
    again = billing.task("looked_up").apply_async(("ann",), task_id="looked-up-again")
    assert result.get(timeout=60) is None  # the worker's process knows nobody
    again.get(timeout=60)
    assert operation(billing, result.id).account == "tenant:first"
    assert operation(billing, result.id).retries == 2
    assert operation(billing, again.id).account == "tenant:second"
    assert {report["account"] for report in reports(billing, "tenant:first")} == {"tenant:first"}


def test_accounts_and_groups_of_every_shape(billing: Service) -> None:
    """Case E5: each is its own account to its last character, on every side; an empty one is refused."""
    task = billing.task("grouped")
    results = [task.delay(account, group, 0.05) for account in SHAPES for group in (account, "", "plain")[::2]]
    for result in results:
        result.get(timeout=120)
    starts = [record for record in billing.records() if record.event == "start" and record.account in SHAPES]
    assert len(starts) == len(results)
    history = History([billing])
    for account in SHAPES:
        history.check_bound(1, account=account)
        assert {group for (group,) in rows(billing, "operations", "group", account=account)} == {account, "plain"}
    assert {report["account"] for report in reports(billing, "Case")} == {"Case"}
    for account, group in (("", "g"), ("a", ""), ("a" * 1025, "g"), (None, "g"), ("a\0b", "g")):
        with pytest.raises(EnqueueError, match=r"account|group"):
            task.delay(account, group)
    wait_until(lambda: all(forgotten(billing, account) for account in SHAPES), 60, what="all are forgotten")


def test_a_limit_is_lowered_under_load(billing: Service) -> None:
    """Case A12: nothing is revoked, nothing new is given until usage fits, and it converges; nobody else waits."""
    account, flag = "tenant:lowered", billing.folder / "lowered"
    task = billing.task("until")
    limits.set(account, 4, app=billing.app)
    first = [task.delay(account, str(flag)) for _ in range(4)]
    wait_until(lambda: running_now(billing, account) == 4, 30, what="four run")
    limits.set(account, 2, app=billing.app)
    wait_until(lambda: holder_usage(billing.stack, **RULES)[account]["limit"] == 2, 30, what="the holder knows")
    wait_until(lambda: all_read(billing), what="the client has heard of it")
    assert [operation(billing, result.id).state for result in first] == ["running"] * 4
    later = [billing.task("work").delay(account, 0.05) for _ in range(6)]
    lowered_ns = time.monotonic_ns()
    flag.touch()
    for result in (*first, *later):
        result.get(timeout=60)
    history = History([billing])
    history.check_bound(4, account=account)
    history.check_bound(2, account=account, since_ns=lowered_ns)
    assert set(history.starts(account).values()) == {1}


def test_a_groups_limit_is_lowered_under_load(billing: Service) -> None:
    """Case A12: the same for one group; the other group of the account goes on."""
    account, task = "grouped:lowered", billing.task("grouped")
    wide = [task.delay(account, "wf", 1.5) for _ in range(2)]
    wait_until(lambda: running_now(billing, account) == 2, 30, what="two of the group run")
    limits.set(account, 1, group="wf", app=billing.app)
    wait_until(lambda: all_read(billing), what="everybody has heard of it")
    lowered_ns = time.monotonic_ns()
    later = [task.delay(account, "wf", 0.05) for _ in range(4)]
    other = task.delay(account, "other", 0.01)
    assert other.get(timeout=30) == "other"
    for result in (*wide, *later):
        result.get(timeout=60)
    history = History([billing])
    history.check_bound(4, {"wf": 2, "other": 2}, account=account)
    history.check_bound(4, {"wf": 1}, account=account, since_ns=lowered_ns)


@pytest.mark.parametrize("kind", ["limit 0", "pause"])
def test_stopping_an_account(billing: Service, kind: str) -> None:
    """Case A13: admission stops, leases included; running work and its retries go on; it continues within a second."""
    account = f"tenant:{kind}"
    limits.set(account, 2, app=billing.app)
    flag = billing.folder / f"stopped-{kind}"
    running = billing.task("until").delay(account, str(flag))
    retrying = billing.task("retry_until").delay(account, str(flag))
    wait_until(lambda: operation(billing, retrying.id).retries >= 1, 30, what="a retry")
    if kind == "pause":
        pause(account, app=billing.app)
    else:
        limits.set(account, 0, app=billing.app)
    wait_until(lambda: _stopped(billing, account), 30, what="the holder has stopped it")
    wait_until(lambda: all_read(billing), what="the client has heard of it")
    waiting = [billing.task("work").delay(account) for _ in range(3)]
    retries = operation(billing, retrying.id).retries
    wait_until(lambda: operation(billing, retrying.id).retries > retries + 1, 30, what="more retries")
    flag.touch()
    running.get(timeout=60)
    retrying.get(timeout=60)
    other = billing.task("work").delay("tenant:goes-on")
    assert other.get(timeout=60) == "tenant:goes-on"
    wait_until(lambda: all_read(billing), what="the release is known")
    assert [operation(billing, result.id).state for result in waiting] == ["queued"] * 3
    assert set(History([billing]).starts(account)) == {running.id, retrying.id}
    resumed_ns = time.monotonic_ns()
    if kind == "pause":
        resume(account, app=billing.app)
    else:
        limits.set(account, 2, app=billing.app)
    for result in waiting:
        result.get(timeout=60)
    started = min(r.time_ns for r in billing.records() if r.account == account and r.operation_id == waiting[0].id)
    took_s = (started - resumed_ns) / 1e9
    assert took_s < 1 + SLOW_MACHINE_S, f"not within {1 + SLOW_MACHINE_S:g} s: it goes on (after {took_s:.1f} s)"
    History([billing]).check_bound(2, account=account)


def _stopped(service: Service, account: str) -> bool:
    usage = holder_usage(service.stack, **RULES).get(account, {})
    return bool(usage.get("paused") or usage.get("limit") == 0)


def test_being_refused_by_the_semaphore_costs_no_attempt(billing: Service) -> None:
    """Case A27: however long it waits, it is attempt 1, sent once, and has no history."""
    account, flag = "tenant:refused", billing.folder / "refused"
    holding = [billing.task("until").delay(account, str(flag)) for _ in range(2)]
    waiting = [billing.task("work").delay(account) for _ in range(5)]
    wait_until(lambda: refused(billing, account) == [("", 5)], 30, what="five wait, and are told why")
    assert states(billing, account)["queued"] == 5
    flag.touch()
    for result in (*holding, *waiting):
        result.get(timeout=60)
    for result in waiting:
        row = operation(billing, result.id)
        assert (row.attempt, row.retries, row.worker_losses, row.sends) == (1, 0, 0, 1)
        assert not rows(billing, "attempts", "attempt", operation_id=result.id)
