"""A call is one row: what is written, when, and what a second call of the same ID does."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from celery import chain, group
from sqlalchemy import text

from celery_durable import ConfigurationError, DuplicateOperationError, DurableTask, EnqueueError, using
from tests.integration.enqueue_service import Service, service


def test_a_call_with_an_account_waits_for_a_permit(shop: Service) -> None:
    """D2, C19, C24: with broker and result backend down it returns its result at once, committed."""
    result = shop.charge.delay("acme", "wf-7", amount=12)
    assert result.duplicate is False
    row = shop.operation(result.id)
    assert (row.state, row.account, row.group, row.task) == ("queued", "tenant:acme", "wf-7", "charge")
    assert (row.attempt, row.generation, row.sends, row.due_at, row.admitted_at) == (1, 1, 0, None, None)
    assert abs(row.enqueued_at / 1000 - time.time()) < 60
    (wake,) = shop.rows(shop.tables.wakes)
    assert (wake.account, wake.limit, wake.group_limit, wake.mutex) == ("tenant:acme", 5, None, None)
    (payload,) = shop.rows(shop.tables.payloads)
    assert payload.id == result.id
    assert payload.policy == {"limit": 5}
    assert payload.headers["kwargsrepr"] == "{'amount': 12}"


def test_a_call_without_an_account_writes_no_row_but_its_own(shop: Service) -> None:
    result = shop.plain.delay(1)
    row = shop.operation(result.id)
    assert (row.state, row.account, row.group) == ("admitted", None, "")
    assert row.due_at is not None
    assert row.admitted_at == row.enqueued_at or abs(row.admitted_at - row.enqueued_at) < 1_000
    assert shop.count(shop.tables.wakes) == shop.count(shop.tables.outbox) == shop.count(shop.tables.accounts) == 0


def test_a_limit_that_is_not_declared_is_not_sent(shop: Service) -> None:
    """E1: then the holder says 1."""
    shop.plain.apply_async(account="acme")
    (wake,) = shop.rows(shop.tables.wakes)
    assert (wake.account, wake.limit, wake.group_limit, wake.mutex) == ("acme", None, None, None)


@pytest.mark.parametrize("with_account", [True, False])
def test_times_are_the_databases(shop: Service, with_account: bool) -> None:
    """D5, C17: a countdown counts from the database's clock, a point in time is kept as it is."""
    options: dict[str, Any] = {"account": "acme"} if with_account else {}
    later = shop.operation(shop.plain.apply_async(countdown=100, expires=200, **options).id)
    assert later.state == "scheduled"
    assert 99_000 <= later.due_at - later.enqueued_at <= 101_000
    assert 199_000 <= later.expires_at - later.enqueued_at <= 201_000
    at = datetime.now(UTC) + timedelta(hours=1)
    exact = shop.operation(shop.plain.apply_async(eta=at, expires=at, **options).id)
    assert exact.due_at == exact.expires_at == round(at.timestamp() * 1000)
    assert shop.count(shop.tables.wakes) == (2 if with_account else 0)


def test_the_policy_of_a_task_goes_with_each_operation(shop: Service) -> None:
    task = shop.app.task(
        base=DurableTask,
        shared=False,
        lazy=False,
        name="careful",
        account="all",
        mutex=True,
        requeue_after=timedelta(minutes=2),
        max_worker_losses=0,
        retention=3600,
        ignore_result=True,
    )(lambda_body)
    result = task.delay()
    assert shop.operation(result.id).retention_ms == 3_600_000
    payload = shop.rows(shop.tables.payloads)[0]
    assert payload.policy == {"requeue_after_s": 120.0, "max_worker_losses": 0, "mutex": True}
    assert payload.headers["ignore_result"] is True
    assert shop.rows(shop.tables.wakes)[0].mutex is True
    assert result.get() is None  # ignored, as in Celery


def lambda_body() -> None: ...


def test_the_same_id_again_changes_nothing(shop: Service) -> None:
    """A1: the same handle, which tells that it is a duplicate; another task or body raises."""
    first = shop.charge.apply_async(("acme", "wf", 1), task_id="order-81")
    again = shop.charge.apply_async(("acme", "wf", 1), task_id="order-81", priority=9, countdown=50)
    assert (first.duplicate, again.duplicate) == (False, True)
    assert first == again
    for call in (
        lambda: shop.charge.apply_async(("acme", "wf", 2), task_id="order-81"),
        lambda: shop.plain.apply_async(("acme", "wf", 1), task_id="order-81", account="x"),
    ):
        with pytest.raises((DuplicateOperationError, TypeError)):
            call()
    with pytest.raises(DuplicateOperationError, match=r"task_id = 'order-81': .* of plain"):
        shop.plain.apply_async(("acme",), task_id="order-81")
    assert shop.count(shop.tables.operations) == shop.count(shop.tables.payloads) == shop.count(shop.tables.wakes) == 1
    assert shop.operation("order-81").priority == 0


def test_the_same_id_at_the_same_time(shop: Service) -> None:
    """A1: of many that race, one inserts."""
    barrier = threading.Barrier(6)

    def enqueue(_: int) -> bool:
        barrier.wait(10)
        return shop.charge.apply_async(("acme",), task_id="race").duplicate

    with ThreadPoolExecutor(6) as threads:
        duplicates = list(threads.map(enqueue, range(6)))
    assert sorted(duplicates) == [False] + [True] * 5
    assert shop.count(shop.tables.payloads) == shop.count(shop.tables.wakes) == 1


def test_the_account_is_computed_once(shop: Service) -> None:
    """E4"""
    source = {"owner": "first"}
    task = shop.app.task(
        base=DurableTask, shared=False, lazy=False, name="owned", account=lambda: source["owner"], limit=lambda: 7
    )(lambda_body)
    result = task.delay()
    source["owner"] = "second"
    assert shop.operation(result.id).account == "first"
    again = task.apply_async(task_id=result.id)
    assert again.duplicate
    assert shop.operation(result.id).account == "first"
    assert [(wake.account, wake.limit) for wake in shop.rows(shop.tables.wakes)] == [("first", 7)]


ACCOUNTS = ["1", "1:2", "é", "É", " a b ", "'\"`;--%s%(x)s:x", "{}", "x" * 1024, "🦜" * 256, "a\nb\\", "Acme", "acme"]


def test_accounts_and_groups_of_every_shape(shop: Service) -> None:
    """E5: kept as they are and apart from each other, the longest within an index too."""
    for account in ACCOUNTS:
        row = shop.operation(shop.plain.apply_async(account=account, group=account).id)
        assert (row.account, row.group) == (account, account)
    assert len({row.account for row in shop.rows(shop.tables.operations)}) == len(ACCOUNTS)


def test_a_wrong_call_writes_nothing(shop: Service) -> None:
    """E5, E6"""
    for options in ({"account": ""}, {"account": 5}, {"group": "g"}, {"limit": 3}, {"mutex": True}):
        with pytest.raises(EnqueueError, match=f"plain: {next(iter(options))}"):
            shop.plain.apply_async(**options)
    assert shop.count(shop.tables.operations) == 0


@pytest.mark.postgresql
def test_one_round_trip(postgresql_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On PostgreSQL row, payload and wake are one statement, which is its own transaction."""
    seen: list[object] = []
    execute = psycopg.Cursor.execute

    def counted(cursor: Any, query: Any, *args: Any, **options: Any) -> Any:
        seen.append(query)
        return execute(cursor, query, *args, **options)

    with service(postgresql_server) as shop:
        shop.charge.delay("acme")
        assert shop.runtime.bell._silent_until_s.keys() == {"passes"}, "it has rung, and keeps silent for a while"
        shop.runtime.bell._silent_until_s["passes"] = float("inf")
        monkeypatch.setattr(psycopg.Cursor, "execute", counted)
        shop.charge.delay("acme")
        assert len(seen) == 1
        monkeypatch.undo()
        assert shop.count(shop.tables.wakes) == 2


@pytest.mark.postgresql
def test_an_open_transaction_holds_up_nobody(postgresql_server: str) -> None:
    """Rule 1: enqueue takes no lock that another transaction may wait for, in the same account too."""
    with service(postgresql_server) as shop:
        engine = shop.runtime.database.engine
        with engine.connect() as first, engine.connect() as second:
            for connection in (first, second):
                connection.execute(text("SET lock_timeout = '2s'"))
            with using(first):
                shop.charge.delay("acme", "wf")
            with using(second):
                shop.charge.delay("acme", "wf")
            shop.charge.delay("acme", "wf")
            second.commit()
            assert shop.count(shop.tables.operations) == 2
            first.commit()
        assert shop.count(shop.tables.operations) == shop.count(shop.tables.wakes) == 3


@pytest.mark.postgresql
def test_a_connection_that_was_cut_is_replaced(postgresql_server: str) -> None:
    """A server that restarted, or an idle timeout, fails no call."""
    with service(postgresql_server) as shop:
        shop.plain.delay()
        with shop.runtime.database.reading() as connection:
            pid = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
        with service(postgresql_server) as other, other.runtime.database.transaction() as connection:
            connection.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})
        assert shop.plain.delay().duplicate is False
        assert shop.count(shop.tables.operations) == 2


def test_canvas_of_durable_tasks(shop: Service) -> None:
    """D4, as far as enqueue goes: a chain enqueues its first step, a group all of its tasks."""
    result = chain(shop.plain.s(1), shop.charge.s("wf"))()
    assert result.parent is not None
    assert [row.id for row in shop.rows(shop.tables.operations)] == [result.parent.id]
    grouped = group(shop.plain.s(1), shop.charge.s("acme").set(account="other")).apply_async()
    assert [shop.operation(each.id).account for each in grouped.results] == [None, "other"]


def test_a_parent_that_ran_again_sends_its_child_again(shop: Service) -> None:
    """D15: where Celery publishes callbacks and a chain's next step, the first row wins, with other arguments too."""
    publish = shop.app.amqp._retry_publish
    first = publish(shop.plain.apply_async, ("a",), task_id="child")
    again = publish(shop.plain.apply_async, ("b",), task_id="child")
    assert (first.duplicate, again.duplicate) == (False, True)
    assert b'"a"' in shop.rows(shop.tables.payloads)[0].body


def test_arguments_of_a_wrong_type_are_refused(shop: Service) -> None:
    """As in Celery, but before an account is made of a text's characters, and with what to give."""
    wrong: list[tuple[Any, Any, str]] = [
        ("ab", None, r"args = 'ab': give a tuple or a list .*apply_async\(\('ab',\)\)|delay"),
        ("a", 1, r"args = 'a': give a tuple"),
        (5, None, r"args = 5: give a tuple"),
        (("acme",), 1, r"kwargs = 1: give a dictionary"),
        (("acme",), [2], r"kwargs = \[2\]: give a dictionary"),
    ]
    for task in (shop.plain, shop.charge):
        for args, kwargs, says in wrong:
            with pytest.raises(TypeError, match=says):
                task.apply_async(args, kwargs)
        with pytest.raises(TypeError, match=r"args = 'ab': give a tuple"):
            task.enqueue_many([{**task.s(), "args": "ab"}])
    assert shop.count(shop.tables.operations) == 0


@pytest.mark.postgresql
def test_tables_in_a_schema_of_their_own(postgresql_url: str) -> None:
    with service(postgresql_url) as shop, shop.runtime.database.transaction() as connection:
        connection.execute(text("CREATE SCHEMA billing"))
    with service(postgresql_url, database_schema="billing") as shop:
        result = shop.charge.delay("acme")
        assert shop.charge.apply_async(("acme",), task_id=result.id).duplicate
        assert shop.charge.enqueue_many([("acme",)]).count == 1
        assert result.cancel() == "cancelled"
        assert shop.tables.operations.fullname.startswith("billing.")


def test_eager_tasks_run_inline(shop: Service) -> None:
    """D7: no rows, and the same errors of a wrong account as elsewhere."""
    shop.app.conf.task_always_eager = True
    result = shop.charge.delay("acme", amount=3)
    assert (result.get(), result.duplicate) == (3, False)
    assert shop.charge.apply_async(("acme",), account="other", group="g", task_id="x").id == "x"
    with pytest.raises(EnqueueError, match="charge: account"):
        shop.charge.apply_async(("acme",), account="")
    assert shop.charge.enqueue_many([("acme",)]).count == 1
    shop.app.conf.task_always_eager = False
    assert shop.charge.apply(("acme",)).get() == 1
    assert shop.charge("acme") == 1
    assert shop.count(shop.tables.operations) == 0


def test_a_database_without_tables_is_told_with_its_remedy(shop: Service) -> None:
    shop.runtime.tables.metadata.drop_all(shop.runtime.database.engine)
    with pytest.raises(ConfigurationError, match=r"operations, … are missing or not up to date .*durable migrate"):
        shop.plain.delay()


def test_a_service_without_settings_is_told_what_is_missing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from celery import Celery

    monkeypatch.chdir(tmp_path)
    app = Celery("nothing", set_as_current=False)
    task = app.task(base=DurableTask, shared=False, lazy=False, name="t")(lambda_body)
    with pytest.raises(ConfigurationError, match="client_id is not set"):
        task.delay()
