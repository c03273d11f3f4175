"""Allocation: what it costs."""

from __future__ import annotations

from celery_durable.permits.messages import AccountReport, Declared, ReportGroup
from holder_service import semaphore
from tests.effort import instructions


def test_many_pairs_below_a_limit_that_binds_nobody_cost_no_round_each():
    """A38: 4,000 pairs, each with a demand of its own, while every other account waits for this decision."""
    reports = [
        AccountReport(
            client_id=f"client-{client}",
            incarnation="first",
            account="acme",
            seq=1,
            groups=tuple(ReportGroup(group=f"wf-{n}", waiting=1 + (n * 37 + client) % 1_000) for n in range(200)),
            declared=Declared(limit=1_000_000_000),
        )
        for client in range(20)
    ]
    decisions: list[semaphore.Decision] = []
    work = instructions(
        lambda: decisions.append(
            semaphore.decide(semaphore.new_account("acme", 1), reports, 1_000, 1, semaphore.SemaphoreSettings())
        )
    )
    assert work < 2_500 * 4_000, f"{work:,} instructions"
    [decision] = decisions
    wanted = sum(group.waiting for report in reports for group in report.groups)
    assert sum(group.permits for reply in decision.replies for group in reply.groups) >= wanted
