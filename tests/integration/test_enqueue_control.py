"""Where an operation is, what an account uses, cancel and purge, by IDs alone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import func, insert, select, update

import celery_durable
from celery_durable import EnqueueError, OperationNotFound, Purged, using
from celery_durable.store.clock import now_ms
from celery_durable.store.schema import ENDED_STATES
from tests.integration.enqueue_service import Service, service

HOUR_MS = 3_600_000


def end(shop: Service, operation: Any, state: str, ago_ms: int, **values: Any) -> None:
    """It ended so long ago."""
    operations = shop.tables.operations
    with shop.runtime.database.transaction() as connection:
        connection.execute(
            update(operations)
            .where(operations.c.id == operation.id)
            .values(state=state, ended_at=now_ms() - ago_ms, **values)
        )


def left(shop: Service) -> set[str]:
    """The operations that there are."""
    with shop.runtime.database.reading() as connection:
        return set(connection.scalars(select(shop.tables.operations.c.id)))


def test_status_of_one_that_waits(shop: Service) -> None:
    """The row's own times, why it waits, and how many come first."""
    first, second = shop.charge.delay("acme", "wf-7"), shop.charge.delay("acme", "wf-7")
    with shop.runtime.database.transaction() as connection:
        blocked = {"wf-7": "group_limit"}
        connection.execute(insert(shop.tables.accounts).values(account="tenant:acme", state="{}", blocked=blocked))
    found = celery_durable.status(second.id, app=shop.app)
    assert (found.id, found.task, found.state, found.attempt) == (second.id, "charge", "queued", 1)
    assert (found.account, found.group, found.before, found.reason) == ("tenant:acme", "wf-7", 1, "group_limit")
    assert "1 of its group come" in found.summary
    assert abs(datetime.now(UTC) - found.enqueued_at) < timedelta(minutes=1)
    assert (found.admitted_at, found.started_at, found.ended_at, found.worker, found.error) == (None,) * 5
    assert celery_durable.status(first.id, app=shop.app).before == 0


def test_status_of_one_that_ended(shop: Service) -> None:
    operation = shop.plain.delay()
    end(shop, operation, "failed", 0, error="ValueError: no", worker="celery@one", started_at=now_ms() - 1_000)
    found = celery_durable.status(operation.id, app=shop.app)
    assert (found.state, found.error, found.worker, found.reason, found.account) == (
        "failed",
        "ValueError: no",
        "celery@one",
        None,
        None,
    )
    assert found.summary == "ValueError: no"
    assert found.ended_at is not None
    assert found.started_at is not None
    assert found.ended_at - found.started_at == pytest.approx(timedelta(seconds=1), abs=timedelta(milliseconds=200))


@pytest.mark.parametrize("operation_id", ["nothing", "", "nul\0", 7, None])
def test_status_of_none(shop: Service, operation_id: Any) -> None:
    with pytest.raises(OperationNotFound, match="none in this service's database"):
        celery_durable.status(operation_id, app=shop.app)


def test_all_of_it_in_the_callers_transaction(shop: Service) -> None:
    """What is not committed is seen there alone, and what was done there goes with it.

    What was cancelled there is still to be told to the app's result backend, so it is not purged.
    """
    kept = shop.plain.delay()
    end(shop, kept, "succeeded", HOUR_MS)
    with shop.runtime.database.engine.connect() as connection, using(connection):
        operation = shop.charge.delay("acme")
        assert celery_durable.status(operation.id, app=shop.app).state == "queued"
        assert celery_durable.usage("tenant:acme", app=shop.app)[0].waiting == 1
        assert celery_durable.cancel(operation.id, app=shop.app)
        assert celery_durable.status(operation.id, app=shop.app).state == "cancelled"
        assert celery_durable.purge_before(datetime.now(UTC) + timedelta(hours=1), app=shop.app) == Purged(1)
        connection.rollback()
    assert left(shop) == {kept.id}


def test_usage(shop: Service) -> None:
    """All accounts by name, one, and one that nobody knows."""
    shop.charge.delay("bolt")
    for _ in range(2):
        shop.charge.delay("acme", "wf-7")
    found = celery_durable.usage(app=shop.app)
    assert [(each.account, each.waiting, each.in_use) for each in found] == [
        ("tenant:acme", 2, 0),
        ("tenant:bolt", 1, 0),
    ]
    (one,) = celery_durable.usage("tenant:bolt", app=shop.app)
    assert (one.account, one.waiting) == ("tenant:bolt", 1)
    (unknown,) = celery_durable.usage("tenant:coil", app=shop.app)
    assert (unknown.account, unknown.waiting, unknown.in_use, unknown.limit, list(unknown.groups)) == (
        "tenant:coil", 0, 0, None, [],
    )  # fmt: skip


@pytest.mark.parametrize("account", ["", 7, "nul\0"])
def test_usage_of_what_is_no_account(shop: Service, account: Any) -> None:
    with pytest.raises(EnqueueError, match="account"):
        celery_durable.usage(account, app=shop.app)


def test_cancel_says_whether_it_did(shop: Service) -> None:
    waiting, running, ended = shop.plain.delay(), shop.plain.delay(), shop.plain.delay()
    operations = shop.tables.operations
    with shop.runtime.database.transaction() as connection:
        connection.execute(update(operations).where(operations.c.id == running.id).values(state="running"))
    end(shop, ended, "succeeded", 0)
    did = [
        celery_durable.cancel(each, "no longer", app=shop.app) for each in (waiting.id, running.id, ended.id, "none")
    ]
    assert did == [True, True, False, False]
    assert not celery_durable.cancel(None, app=shop.app)  # type: ignore[arg-type]
    assert celery_durable.status(waiting.id, app=shop.app).error == "no longer"
    assert celery_durable.status(running.id, app=shop.app).cancel_requested_at is not None
    with pytest.raises(EnqueueError, match="reason = 7"):
        celery_durable.cancel(running.id, 7, app=shop.app)  # type: ignore[arg-type]


def test_purge_deletes_what_ended_before(shop: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its retention, with payload and history, in several transactions; nothing else."""
    monkeypatch.setattr("celery_durable.control.PURGE_ROWS", 2)
    old = [shop.plain.delay() for _ in range(5)]
    for number, operation in enumerate(old):
        end(shop, operation, ENDED_STATES[number % 3], 2 * HOUR_MS, retention_ms=None if number % 2 else number + 10**9)
    fresh, waiting = shop.plain.delay(), shop.plain.delay()
    end(shop, fresh, "succeeded", 0)
    untold = shop.plain.delay()
    end(shop, untold, "succeeded", 2 * HOUR_MS)
    with shop.runtime.database.transaction() as connection:
        connection.execute(insert(shop.tables.untold).values(operation_id=untold.id, generation=1, due_at=0))
    done = celery_durable.purge_before(datetime.now(UTC) - timedelta(hours=1), app=shop.app)
    counts = {state: sum(1 for n in range(5) if ENDED_STATES[n % 3] == state) for state in ENDED_STATES}
    assert done == Purged(**counts)
    assert done.operations == 5
    assert left(shop) == {fresh.id, waiting.id, untold.id}
    with shop.runtime.database.reading() as connection:
        assert connection.scalar(select(func.count()).select_from(shop.tables.payloads)) == 3
    assert celery_durable.purge_before(datetime.now(UTC) - timedelta(hours=1), app=shop.app) == Purged()


def test_a_naive_time_is_utc(shop: Service) -> None:
    """As Celery takes a naive ``eta``."""
    operation = shop.plain.delay()
    end(shop, operation, "cancelled", HOUR_MS)
    now = datetime.now(UTC).replace(tzinfo=None)
    assert celery_durable.purge_before(now - timedelta(hours=2), app=shop.app).operations == 0
    assert celery_durable.purge_before(now, app=shop.app).cancelled == 1


@pytest.mark.parametrize("time", [None, 7, "2026-01-01", timedelta(days=1)])
def test_purge_before_what_is_no_time(shop: Service, time: Any) -> None:
    with pytest.raises(EnqueueError, match=r"time = .*give a datetime"):
        celery_durable.purge_before(time, app=shop.app)


__all__ = ["service"]
