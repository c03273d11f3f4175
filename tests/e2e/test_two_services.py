"""Two services that share no database, on PostgreSQL, Apache Kafka and Redis, under one holder."""

from __future__ import annotations

from collections import Counter

import pytest
from sqlalchemy import func, select

from celery_durable.runtime import runtime_of
from tests.example.records import most_at_once
from tests.harness import Service, Stack, wait_until

ACCOUNTS, OPERATIONS, LIMIT = 50, 2_000, 2
DEADLINE_S = 240

pytestmark = [pytest.mark.processes, pytest.mark.timeout(DEADLINE_S + 120)]


def states(service: Service) -> Counter[str]:
    """How many operations are in each state."""
    runtime = runtime_of(service.app)
    operations = runtime.tables.operations
    with runtime.database.reading() as connection:
        rows = connection.execute(select(operations.c.state, func.count()).group_by(operations.c.state))
        return Counter({str(state): int(count) for state, count in rows})


def outbox_depth(service: Service) -> int:
    """Messages that Kafka has not yet."""
    runtime = runtime_of(service.app)
    with runtime.database.reading() as connection:
        return int(connection.scalar(select(func.count()).select_from(runtime.tables.outbox)) or 0)


def test_fifty_accounts_never_pass_their_limits(real_stack: Stack) -> None:
    """2,000 operations of 20 ms: all succeed, no account has more than its limit at once, nothing is left in use."""
    services = [real_stack.service("billing"), real_stack.service("crm")]
    real_stack.holder()
    for number, service in enumerate(services):
        task = service.task("work")
        calls = [task.s(f"tenant:{(n + number) % ACCOUNTS}", 0.02) for n in range(OPERATIONS // 2)]
        assert task.enqueue_many(calls).count == OPERATIONS // 2
        service.dispatcher()
        service.worker(concurrency=4)
    wait_until(
        lambda: all(states(service) == {"succeeded": OPERATIONS // 2} for service in services),
        DEADLINE_S,
        what=f"{OPERATIONS} operations succeeded",
    )
    records = sorted((record for service in services for record in service.records()), key=lambda each: each.time_ns)
    runs = Counter(record.operation_id for record in records if record.event == "start")
    assert len(runs) == OPERATIONS
    assert set(runs.values()) == {1}
    assert max(most_at_once(records).values()) <= LIMIT
    wait_until(lambda: not any(outbox_depth(service) for service in services), 60, what="empty outboxes")
