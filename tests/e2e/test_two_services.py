"""Two services that share no database, on PostgreSQL, Apache Kafka and Redis, under one holder."""

from __future__ import annotations

import pytest

from tests.e2e.observe import History, all_read, holder_usage, in_use, outbox_depth, states
from tests.harness import Stack, wait_until

ACCOUNTS, OPERATIONS, LIMIT = 50, 2_000, 2
DEADLINE_S = 240

pytestmark = [pytest.mark.processes, pytest.mark.timeout(DEADLINE_S + 120)]


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
    history = History(services)
    history.check_bound(LIMIT)
    assert len(history.starts()) == OPERATIONS
    assert set(history.starts().values()) == {1}
    assert not any(in_use(service) for service in services)
    wait_until(lambda: all(all_read(service) for service in services), 60, what="empty outboxes on both sides")
    assert not any(outbox_depth(service) for service in services)

    def nothing_counted() -> bool:
        usages = holder_usage(real_stack).values()
        return not any(usage["in_use"] or usage["waiting"] for usage in usages)

    wait_until(nothing_counted, 60, what="the holder counts nothing as in use")
