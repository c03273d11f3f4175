"""Passes beside another dispatcher's passes and beside others' transactions."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from sqlalchemy import text, update

from celery_durable.dispatcher import passes as passes_module
from celery_durable.dispatcher.passes import Passes
from celery_durable.permits.messages import ReplyGroup
from celery_durable.store.accounts import Accounts
from tests.dispatching import Service
from tests.harness import wait_until


def test_who_holds_an_operation_stalls_no_account(postgresql: Service) -> None:
    """A36: a cancel that is not committed yet; rolled back, its operation is admitted without anybody's wake."""
    service = postgresql
    service.add("held", "free")
    service.run_passes()
    passes = service.again().passes()
    operations = service.tables.operations
    with service.database.engine.connect() as user:
        user.execute(update(operations).where(operations.c.id == "held").values(state="cancelled"))
        service.lease(2)
        assert service.ids("admitted") == ["free"]
        user.rollback()
    wait_until(lambda: passes.step() is None, what="the pass that looks again")
    assert service.ids("admitted") == ["held", "free"]


def test_a_locked_account_is_left_to_who_locked_it(postgresql: Service) -> None:
    """SKIP LOCKED when polled; a reply waits; the wake is not lost."""
    service = postgresql
    service.add("op")
    service.run_passes()
    service.sent()
    accounts = Accounts(service.tables, "postgresql", waiting_count_max=1_000)
    other = service.again()
    passes = other.passes()
    service.add("two")
    service.add("unrelated", account="zeta")
    with ThreadPoolExecutor(1) as threads:
        with service.database.transaction() as connection:
            assert set(accounts.lock(connection, ["acme"], wait=True)) == {"acme"}
            assert passes.step() is None
            assert service.report("zeta") is not None
            assert passes.step() == passes_module.CONTENTION_PAUSE_S
            assert service.count("wakes") == 1
            applying = threads.submit(other.apply, service.reply(ReplyGroup(permits=2)))
            wait_until(lambda: service.waiting_for_locks() > 0, what="the reply waits for the lock")
            assert not applying.done()
        applying.result(20)
    assert service.in_use() == 2
    assert service.count("wakes") == 0


def test_a_wake_that_commits_after_its_neighbour_is_seen(postgresql: Service) -> None:
    """B12."""
    service = postgresql
    passes = service.again().passes()
    with service.database.transaction() as late:
        service.insert(late, ["late"], account="acme")
        service.again().add("early", account="acme")
        service.run_passes(passes)
        assert service.count("wakes") == 0
    service.run_passes(passes)
    report = service.report()
    assert report is not None
    assert report.groups[0].waiting == 2


def test_an_account_that_another_one_is_making_is_not_waited_for(postgresql: Service) -> None:
    """Else two deadlock: the one that makes the row may next wait for an account that this one has locked."""
    service = postgresql
    accounts = Accounts(service.tables, "postgresql", waiting_count_max=10)
    with service.database.transaction() as connection:
        accounts.lock(connection, ["b"], wait=True)
    other = service.again()

    def lock_others() -> dict[str, str | None]:
        with other.database.transaction() as connection:
            return accounts.lock(connection, ["a", "b", "c"], wait=False)

    with ThreadPoolExecutor(1) as thread, service.database.transaction() as connection:
        assert set(accounts.lock(connection, ["a"], wait=True)) == {"a"}
        assert set(thread.submit(lock_others).result(30)) == {"b", "c"}
    other.database.dispose()


def test_two_dispatchers_lose_no_wake_and_keep_the_bound(database_url: str) -> None:
    """A30, A41, B11: enqueues, settles, replies and two dispatchers' passes at once; every operation gets through."""
    service = Service(database_url, idle_return_s=600)
    accounts, each, limit = ["a", "b", "c"], 25, 2
    done, stop = threading.Event(), threading.Event()

    def enqueue(own: Service, account: str) -> None:
        for n in range(each):
            own.add(f"{account}{n}", account=account, group=f"g{n % 2}")

    def work(own: Service) -> None:
        while not done.is_set():
            for account in accounts:
                own.look(account, 2 * limit, {"g0": limit, "g1": limit})
                if admitted := own.ids("admitted", account=account):
                    own.end(*admitted[:2])
            time.sleep(0.005)

    def dispatch(own: Service, passes: Passes) -> None:
        while not stop.is_set():
            if passes.step() is not None:
                time.sleep(0.005)
        own.database.drop_held()

    def reply(own: Service) -> None:
        version = 0
        while not stop.is_set():
            version += 1
            groups = [ReplyGroup(group=name, permits=limit) for name in ("g0", "g1")]
            own.apply(*(own.reply(*groups, account=account, version=version) for account in accounts))
            time.sleep(0.03)

    owns = [service.again() for _ in range(7)]
    with ThreadPoolExecutor(8) as threads:
        running = [threads.submit(dispatch, own, own.passes()) for own in owns[:2]]
        running += [threads.submit(reply, owns[2]), threads.submit(work, owns[3])]
        writing = [threads.submit(enqueue, own, account) for own, account in zip(owns[4:], accounts, strict=True)]
        try:
            for one in writing:
                one.result(60)
            wait_until(lambda: len(service.ids("succeeded")) == len(accounts) * each, 60, what="all are done")
        finally:
            done.set()
            stop.set()
        for one in running:
            one.result(20)
    service.invariants.require("bound", "group bound", "ack", "seq")
    service.run_passes()
    assert service.count("wakes") == 0
    assert service.ids("queued", "admitted") == []
    service.close()


def test_woken_accounts_take_turns(database_url: str) -> None:
    """A28: accounts that are woken again and again do not hide those behind them."""
    service = Service(database_url, pass_accounts_max=2)
    passes = service.passes()
    for account in ("a", "b", "c", "d", "e"):
        service.add(account, account=account)
    for _ in range(3):
        assert passes.step() is None
        service.add(f"a-{time.monotonic_ns()}", f"b-{time.monotonic_ns()}", account="a")
    assert all(service.report(account) is not None for account in ("a", "b", "c", "d", "e"))
    service.close()


def test_accounts_take_turns_in_whatever_order_the_database_sorts(postgresql: Service) -> None:
    """A28: a database sorts text by its locale ("a" before "B"), Python does not: no account is left out by that."""
    with postgresql.database.transaction() as connection:
        for table in ("wakes", "accounts"):
            name = getattr(postgresql.tables, table).name
            connection.execute(text(f'ALTER TABLE {name} ALTER COLUMN account TYPE text COLLATE "en-x-icu"'))
    passes = postgresql.passes()
    for account in ("B", "a"):
        postgresql.add(f"first {account}", account=account)
        postgresql.run_passes(passes)
        assert postgresql.report(account) is not None
    for account in ("a", "B", "c"):
        postgresql.add(f"second {account}", account=account)
        postgresql.run_passes(passes)
        assert postgresql.count("wakes") == 0
