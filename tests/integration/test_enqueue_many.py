"""``enqueue_many``: batches of rows, without a limit on how many."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Task
from sqlalchemy import event
from sqlalchemy.orm import Session

from celery_durable import DuplicateOperationError, Enqueued, EnqueueError, message, using
from tests.integration.enqueue_service import Service, service


def test_tuples_and_signatures(shop: Service) -> None:
    calls = [
        ("acme", "wf", 1),
        ["acme"],
        shop.charge.s("zeta", amount=2).set(task_id="order-81", account="own", countdown=10, priority=4),
        dict(shop.charge.s("json")),
    ]
    done = shop.charge.enqueue_many(calls)
    rows = shop.rows(shop.tables.operations)
    assert done == Enqueued(tuple(row.id for row in rows), ())
    assert done.count == 4
    assert [row.account for row in rows] == ["tenant:acme", "tenant:acme", "own", "tenant:json"]
    assert [row.state for row in rows] == ["queued", "queued", "scheduled", "queued"]
    assert (rows[2].id, rows[2].priority) == ("order-81", 4)
    assert sorted(wake.account for wake in shop.rows(shop.tables.wakes)) == ["own", "tenant:acme", "tenant:json"]
    assert shop.charge.enqueue_many([]) == Enqueued((), ())


def test_duplicates_are_reported_and_change_nothing(shop: Service) -> None:
    """A1: those in the database, and those within the batch."""

    def calls(first: int, last: int) -> Iterator[Any]:
        return (shop.charge.s("acme", amount=n).set(task_id=f"order-{n}") for n in range(first, last))

    assert shop.charge.enqueue_many(calls(0, 5)).count == 5
    done = shop.charge.enqueue_many(calls(3, 8))
    assert done == Enqueued(tuple(f"order-{n}" for n in range(3, 8)), ("order-3", "order-4"))
    assert done.count == 3
    twice = [*calls(8, 9), *calls(8, 9)]
    assert shop.charge.enqueue_many(twice) == Enqueued(("order-8", "order-8"), ("order-8",))
    assert shop.count(shop.tables.operations) == shop.count(shop.tables.payloads) == 9


def test_progress_is_told_after_each_batch(shop: Service) -> None:
    """In the caller's transaction too; an error of its own ends the rest."""
    told: list[int] = []
    calls = [("acme",)] * 5
    shop.charge.enqueue_many(calls, batch_rows=2, progress=told.append)
    with shop.runtime.database.engine.begin() as connection, using(connection):
        shop.charge.enqueue_many(calls, batch_rows=3, progress=told.append)
    assert told == [2, 4, 5, 3, 5]
    with pytest.raises(ZeroDivisionError) as caught:
        shop.charge.enqueue_many(calls, batch_rows=2, progress=lambda done: done // 0)
    assert caught.value.__notes__ == ["enqueue_many: 2 operations of batches before this one are committed"]
    with pytest.raises(EnqueueError, match="progress = 5: give a callable"):
        shop.charge.enqueue_many(calls, progress=5)  # type: ignore[arg-type]
    assert shop.count(shop.tables.operations) == 12


def test_another_body_under_a_known_id_writes_nothing_of_its_batch(shop: Service) -> None:
    """A1"""
    calls = [shop.charge.s("acme").set(task_id=f"order-{n}") for n in range(4)]
    shop.charge.enqueue_many(calls[:1])
    calls += [shop.charge.s("other").set(task_id="order-0")]
    with pytest.raises(DuplicateOperationError, match="order-0") as caught:
        shop.charge.enqueue_many(calls, batch_rows=3)
    assert caught.value.__notes__ == ["enqueue_many: 2 operations of batches before this one are committed"]
    assert shop.count(shop.tables.operations) == 3


def test_the_whole_of_it_obeys_the_callers_transaction(shop: Service) -> None:
    """D11"""
    with Session(shop.runtime.database.engine) as session:
        with using(session):
            assert shop.charge.enqueue_many([("a",)] * 7, batch_rows=2).count == 7
        assert shop.count(shop.tables.operations) == 0
        session.rollback()
    assert shop.count(shop.tables.operations) == shop.count(shop.tables.wakes) == 0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("acme", "enqueue_many got 'acme'"),
        (5, "enqueue_many got 5"),
        ({"tenant": "acme"}, "enqueue_many got"),
        (("",), "tenant = ''"),
        ((object(),), "cannot be serialised"),
    ],
)
def test_wrong_items_are_told(sqlite_url: str, call: Any, says: str) -> None:
    with service(sqlite_url) as shop:
        with pytest.raises((EnqueueError, TypeError), match=None) as caught:
            shop.charge.enqueue_many([("acme",), call])
        assert says in str(caught.value)
        assert shop.count(shop.tables.operations) == 0
        with pytest.raises(EnqueueError, match="got a signature of plain"):
            shop.charge.enqueue_many([shop.plain.s()])
        with pytest.raises(EnqueueError, match="batch_rows = 0"):
            shop.charge.enqueue_many([], batch_rows=0)


def test_large_bodies_end_a_batch_early(sqlite_url: str) -> None:
    with service(sqlite_url) as shop:
        commits: list[int] = []
        event.listen(shop.runtime.database.engine, "commit", lambda connection: commits.append(1))
        shop.plain.enqueue_many(("x" * 1_500_000,) for _ in range(6))
        assert len(commits) == 2


ROWS = 100_000


def test_a_hundred_thousand_rows_at_once(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No parameter limit and no memory peak: the rows of one batch are in memory, whatever their number.

    Celery takes most of a call's time to make its message: here one message stands for all, each under its own ID.
    """
    with service(sqlite_url) as shop:
        one = message.capture(shop.plain, (1,), None, send=functools.partial(Task.apply_async, shop.plain))
        numbers = itertools.count()
        monkeypatch.setattr(message, "capture", lambda *_, **__: dataclasses.replace(one, id=f"order-{next(numbers)}"))
        peaks: list[int] = []

        def calls() -> Iterator[tuple[int]]:
            for number in range(ROWS):
                if number == 2_000:
                    tracemalloc.start(1)
                if number == 6_000:
                    peaks.append(tracemalloc.get_traced_memory()[1])
                    tracemalloc.stop()  # it makes everything slow
                yield (number,)

        assert shop.plain.enqueue_many(calls()).count == ROWS
        assert shop.count(shop.tables.operations) == shop.count(shop.tables.payloads) == ROWS
        (peak,) = peaks
        assert peak < 30_000_000


@pytest.mark.postgresql
def test_a_batch_beyond_the_limit_of_parameters(postgresql_server: str) -> None:
    """PostgreSQL takes 65,535 parameters in one statement: 5,000 rows have more."""
    with service(postgresql_server) as shop:
        calls = [shop.charge.s(f"t{n % 9}").set(task_id=f"order-{n}") for n in range(5_000)]
        assert shop.charge.enqueue_many(calls, batch_rows=10_000).count == 5_000
        assert [row.id for row in shop.rows(shop.tables.operations, "id", "order_no")][:3] == [
            "order-0",
            "order-1",
            "order-2",
        ]
        again = shop.charge.enqueue_many(calls[:1_000], batch_rows=10_000)
        assert (again.count, len(again.duplicates)) == (0, 1_000)
        assert shop.count(shop.tables.wakes) == 9


def test_equal_values_that_are_other_documents_stay_apart(shop: Service) -> None:
    """``True == 1`` in Python, and not in JSON: columns with one value for all rows are written once."""
    values: list[Any] = [True, 1, 1.0]
    calls = [shop.plain.s().set(task_id=f"n{number}", headers={"n": value}) for number, value in enumerate(values)]
    shop.plain.enqueue_many(calls)
    rows = shop.rows(shop.tables.payloads, "id", "headers")
    found = {row.id: row.headers["n"] for row in rows}
    assert [(type(found[f"n{number}"]), found[f"n{number}"]) for number in range(3)] == [
        (type(value), value) for value in values
    ]


def test_what_some_calls_have_and_others_lack(shop: Service) -> None:
    options: list[dict[str, Any]] = [{}, {"countdown": 60}, {"priority": 3}, {"expires": 60}, {"account": "acme"}, {}]
    shop.plain.enqueue_many(shop.plain.s().set(task_id=f"m{number}", **one) for number, one in enumerate(options))
    rows = {row.id: row for row in shop.rows(shop.tables.operations)}
    assert [rows[f"m{number}"].state for number in range(6)] == [
        *("admitted", "scheduled", "admitted", "admitted", "queued", "admitted")
    ]
    assert [rows[f"m{number}"].priority for number in range(6)] == [0, 0, 3, 0, 0, 0]
    assert [rows[f"m{number}"].account for number in range(6)] == [None, None, None, None, "acme", None]
    assert [rows[f"m{number}"].expires_at is None for number in range(6)] == [True, True, True, False, True, True]
    orders = [rows[f"m{number}"].order_no for number in range(6)]
    assert orders == sorted(orders)
