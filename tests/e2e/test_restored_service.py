"""A service whose database is restored from a backup, while the rest of the world has moved on (case A19)."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import select

from celery_durable.runtime import runtime_of
from tests.e2e.observe import History, all_read, in_use, reports
from tests.harness import Service, Stack, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.postgresql, pytest.mark.kafka, pytest.mark.timeout(400)]

DEADLINE_S = 90.0
ACCOUNT = "tenant:acme"


def backup(service: Service) -> dict[str, list[dict[str, Any]]]:
    """Every row of every table."""
    runtime = runtime_of(service.app)
    with runtime.database.reading() as connection:
        return {
            table.name: [dict(row._mapping) for row in connection.execute(select(table))]
            for table in runtime.tables.metadata.sorted_tables
        }


def restore(service: Service, rows: dict[str, list[dict[str, Any]]]) -> None:
    """Puts the database back to what it was; no process of the service may run."""
    runtime = runtime_of(service.app)
    with runtime.database.engine.begin() as connection:
        for table in runtime.tables.metadata.sorted_tables:
            connection.execute(table.delete())
            if rows[table.name]:
                connection.execute(table.insert(), rows[table.name])


def works(service: Service, account: str, count: int) -> None:
    """So many operations of the account succeed."""
    results = [service.task("work").delay(account) for _ in range(count)]
    assert [result.get(timeout=DEADLINE_S) for result in results] == [account] * count


def test_a_service_restored_from_a_backup_goes_on(real_stack: Stack) -> None:
    """Case A19: noticed before anything is admitted; its leases are void, its ``seq`` moves on, and it works again."""
    billing, crm = real_stack.service("billing", idle_return_s=300.0), real_stack.service("crm", idle_return_s=1.0)
    real_stack.holder()
    dispatcher, worker = billing.dispatcher(), billing.worker()
    crm.dispatcher()
    crm.worker()
    works(billing, ACCOUNT, 4)
    wait_until(lambda: all_read(billing), DEADLINE_S, what="nothing under way")
    old = backup(billing)
    assert old["durable_accounts"], "the backup has a lease"
    # The lease goes to the other service, and comes back in part; other accounts come and go.
    works(crm, ACCOUNT, 4)
    for number in range(6):
        works(billing, f"tenant:{number}", 2)
    flag = crm.folder / "go"
    held = [crm.task("until").delay(ACCOUNT, str(flag)) for _ in range(2)]
    wait_until(lambda: in_use(crm) == 2, DEADLINE_S, what="crm has both permits")
    wait_until(lambda: all_read(billing) and all_read(crm), DEADLINE_S, what="nothing under way")
    said = max(report["seq"] for report in reports(billing, ACCOUNT))

    dispatcher.kill()
    worker.kill()
    restore(billing, old)
    waiting = [billing.task("work").delay(ACCOUNT) for _ in range(4)]
    dispatcher = billing.dispatcher()
    billing.worker()
    wait_until(lambda: "was restored from an earlier state" in dispatcher.log.read_text(), DEADLINE_S, what="a warning")
    newest = wait_until(
        lambda: next((report for report in reports(billing, ACCOUNT) if report["seq"] > said), None),
        DEADLINE_S,
        what="a report above all that the lost life has sent",
    )
    assert [(group["waiting"], group["claimed"] - group["released"]) for group in newest["groups"]] == [(4, 0)]
    works(billing, "tenant:fresh", 2)
    assert not any(result.ready() for result in waiting), "the old lease admits nothing"
    flag.touch()
    assert all(result.get(timeout=DEADLINE_S) for result in held)
    assert [result.get(timeout=DEADLINE_S) for result in waiting] == [ACCOUNT] * 4
    History([billing, crm]).check_bound(2)
