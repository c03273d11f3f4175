"""Backlogs of 10,000 (on SQLite 3,000), and clients that compete: two services, two databases, one holder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from celery_durable import limits
from tests.e2e.observe import (
    History,
    holder_usage,
    operation,
    permit_spans,
    replies,
    reports,
    states,
    wait_ended,
)
from tests.harness import EMBEDDED, REAL, Process, Service, Stack, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

BACKLOG = {REAL: 10_000, EMBEDDED: 3_000}
RACES = {REAL: 1_000, EMBEDDED: 250}
RULES = {"limits": {"wide": 6}}
FRESH_MS = 5_200
"""A little more than what a report is fresh for."""
NEXT_IN_LINE_MAX = 300
"""Operations of a backlog of 10,000 that may start before the other client's only one; a turn lasts 200 ms."""


@dataclass
class Running:
    """Two services with a dispatcher and a worker each."""

    stack: Stack
    billing: Service
    crm: Service
    crm_dispatcher: Process

    @property
    def both(self) -> list[Service]:
        """Both."""
        return [self.billing, self.crm]


@pytest.fixture(scope="module")
def running(module_stack: Stack) -> Running:
    # On SQLite a settle may wait for seconds behind ten thousand inserts: that is no lost worker.
    patient = {"idle_return_s": 5.0, "heartbeat_timeout_s": 60.0, "resend_min_s": 20.0}
    services = [module_stack.service(name, **patient) for name in ("billing", "crm")]
    module_stack.holder(**RULES)
    dispatchers = [service.dispatcher() for service in services]
    for service in services:
        service.worker(concurrency=4)
    return Running(module_stack, *services, dispatchers[1])


def stop_account(service: Service, account: str) -> None:
    """Lets the rest of a backlog wait, so that it costs the other tests nothing."""
    limits.set(account, 0, app=service.app)
    wait_until(lambda: not {"admitted", "running"} & states(service, account).keys(), 60, what="the backlog stops")


def test_races_for_the_last_permit(running: Running) -> None:
    """Case A9: 1,000 races of two clients, two databases, for the last permit: exactly one gets it, then the other.

    By the times that the tasks recorded, and by the times for which the rows held their permits.
    """
    races = RACES[running.stack.kind]
    accounts = [f"race:{number}" for number in range(races)]
    for at in range(0, races, 50):
        for service in running.both:
            service.task("single").enqueue_many([(account, 0.005) for account in accounts[at : at + 50]])
    for service in running.both:
        wait_until(lambda service=service: states(service) == {"succeeded": races}, 240, what="all races are run")
    history = History(running.both)
    history.check_bound(1)
    starts = [count for service in running.both for count in History([service]).starts().values()]
    assert set(starts) == {1}
    spans: dict[str, list[tuple[int, int]]] = {}
    for service in running.both:
        for account, admitted, ended in permit_spans(service):
            spans.setdefault(account, []).append((admitted, ended))
    for account in accounts:
        first, second = sorted(spans[account])
        assert first[1] <= second[0], f"both had the permit of {account}: {first} {second}"


def test_a_full_group_hides_no_other(running: Running) -> None:
    """Case A10: with 10,000 waiting in a full group, another group of the same account is served at once."""
    service, account, backlog = running.billing, "wide:groups", BACKLOG[running.stack.kind]
    task = service.task("grouped")
    task.enqueue_many([(account, "full", 0.5)] * backlog)
    wait_until(lambda: states(service, account)["running"] == 2, 60, what="the full group runs")
    results = [task.delay(account, f"late-{number}", 0.01) for number in range(3)]
    for result in results:
        result.get(timeout=30)
    left = states(service, account)["queued"]
    stop_account(service, account)
    assert left > backlog - 200
    history = History([service])
    history.check_bound(6, {"full": 2, "late-0": 2, "late-1": 2, "late-2": 2}, account=account)
    assert set(history.starts(account).values()) == {1}


@pytest.mark.parametrize("limit", [1, 4])
def test_a_backlog_does_not_starve_one_item(running: Running, limit: int) -> None:
    """Case A11: 10,000 of one client and one item of another: both move in one allocation; at limit 1, a turn later."""
    account = f"tenant:backlog-{limit}"
    backlog = [(account, limit, 0.05 * limit)] * BACKLOG[running.stack.kind]  # it drains by 20 a second at most
    running.billing.task("limited").enqueue_many(backlog)
    wait_until(lambda: states(running.billing, account)["succeeded"] >= 10, 60, what="the backlog moves")
    before = started(running.billing, account)
    one = running.crm.task("limited").delay(account, limit, 0.02)
    one.get(timeout=60)
    between = started(running.billing, account) - before
    left = states(running.billing, account)["queued"]
    stop_account(running.billing, account)
    assert between < NEXT_IN_LINE_MAX
    assert left > len(backlog) // 2
    History(running.both).check_bound(limit, account=account)


def started(service: Service, account: str) -> int:
    """How many operations of the account have started."""
    return len(History([service]).starts(account))


def test_two_hungry_clients_take_turns(running: Running) -> None:
    """Case A34: at limit 1 both get about half, in turns."""
    account, count = "tenant:shared", 80
    for service in running.both:
        service.task("single").enqueue_many([(account, 0.02)] * count)
    wait_until(
        lambda: any(states(each, account)["succeeded"] == count for each in running.both), 120, what="one is done"
    )
    done = [states(service, account)["succeeded"] for service in running.both]
    for service in running.both:
        wait_ended(service, account, count, 120)
    assert min(done) > 0.3 * count, done
    history = History(running.both)
    history.check_bound(1, account=account)
    assert any("turn_ms" in group for reply in replies(running.crm, account) for group in reply["groups"])


def test_a_permit_of_one_service_reaches_a_silent_other(running: Running) -> None:
    """Case A2: a client that did not report for 5 s is offered the permit, claims it, and only then is admitted."""
    account, flag = "tenant:handed-over", running.billing.folder / "hand-over"
    for result in [running.billing.task("until").delay(account, str(flag)) for _ in range(2)]:
        wait_until(lambda result=result: operation(running.billing, result.id).state == "running", 60, what="it runs")
    late = running.crm.task("work").delay(account)
    wait_until(lambda: replies(running.crm, account), 30, what="the other one asks, and must wait")
    running.crm_dispatcher.freeze()
    try:
        wait_until(lambda: silent_ms(running.crm, account) > FRESH_MS, 60, what="it is silent")
        flag.touch()
        offer = wait_until(lambda: offering(replies(running.crm, account)), 60, what="an offer")
        assert not any(group["permits"] for group in offer["groups"])
    finally:
        running.crm_dispatcher.thaw()
    assert late.get(timeout=60) == account
    claims = [report for report in reports(running.crm, account) if (report.get("ack") or {}).get("version", 0) > 0]
    assert offer["version"] <= max(report["ack"]["version"] for report in claims)
    given = next(reply for reply in replies(running.crm, account) if any(each["permits"] for each in reply["groups"]))
    assert given["version"] > offer["version"]
    assert given["answers"] in [report["seq"] for report in claims if report["ack"]["version"] >= offer["version"]]
    History(running.both).check_bound(2, account=account)


def silent_ms(service: Service, account: str) -> int:
    """For how long the holder has heard nothing of the service in this account."""
    clients = holder_usage(service.stack, **RULES)[account]["clients"]
    return next(int(client["last_report_ms"]) for client in clients if client["client_id"] == service.name)


def offering(found: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first reply with a grant."""
    return next((each for each in found if any(group["offered"] for group in each["groups"])), None)
