"""The client's passes on real databases, with replies made by hand."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import case, event, insert, select, text, update

from celery_durable.dispatcher import passes as passes_module
from celery_durable.dispatcher.passes import Passes
from celery_durable.errors import ConfigurationError
from celery_durable.permits.messages import Blocked, Declared, ReplyGroup
from celery_durable.store import outbox
from celery_durable.store.accounts import Accounts, client_identity, wake_declaring
from celery_durable.store.clock import now_ms
from tests.dispatching import Service, counted_statements


@pytest.fixture
def service(database_url: str) -> Iterator[Service]:
    service = Service(database_url)
    yield service
    service.close()


@pytest.fixture
def postgresql(postgresql_url: str) -> Iterator[Service]:
    """For what SQLite, with its one writer, cannot show."""
    service = Service(postgresql_url)
    yield service
    service.close()


def until(condition: Callable[[], Any], deadline_s: float = 20) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {deadline_s:g} s: what the test waits for"
        time.sleep(0.01)


def fail_for(monkeypatch: pytest.MonkeyPatch, account: str) -> None:
    """Has every pass of the account fail."""
    real = passes_module.plan

    def failing(state: Any, *arguments: Any, **options: Any) -> Any:
        if state.account == account:
            raise ValueError("no such thing")
        return real(state, *arguments, **options)

    monkeypatch.setattr(passes_module, "plan", failing)


# Admission


def test_an_operation_waits_until_the_holder_has_given_a_permit(service: Service) -> None:
    """A2, A21: a grant is claimed by a report and admits nothing; the lease that confirms it does."""
    service.add("op")
    service.run_passes()
    report = service.sent()
    assert report is not None
    assert [(one.group, one.waiting, one.claimed) for one in report.groups] == [("", 1, 0)]
    service.apply(service.reply(ReplyGroup(offered=1), ack_wanted=True))
    assert service.ids("queued") == ["op"]
    claim = service.sent()
    assert claim is not None
    assert claim.seq > report.seq
    assert claim.ack is not None
    service.apply(service.reply(ReplyGroup(permits=1)))
    row = service.row("op")
    assert (row.state, row.sends, row.attempt) == ("admitted", 1, 1)
    assert row.admitted_at is not None
    assert row.due_at > row.admitted_at
    assert [(one.id, one.attempt, one.generation, one.queue) for one in service.handed] == [("op", 1, 1, "celery")]


def test_a_spare_permit_serves_a_new_operation_without_a_message(service: Service) -> None:
    """A3; A6: a claim within a lease sends nothing."""
    service.add("first")
    service.run_passes()
    service.lease(2)
    service.sent()
    service.add("second")
    service.run_passes()
    assert service.ids("admitted") == ["first", "second"]
    service.end("first")
    service.add("third")
    service.run_passes()
    assert service.ids("admitted") == ["second", "third"]
    assert service.report() is None


def test_neither_permits_nor_the_claim_ceiling_is_passed(service: Service) -> None:
    """A6."""
    service.add(*(f"op{n}" for n in range(6)))
    service.run_passes()
    service.lease(2, claims=3)
    assert service.in_use() == 2
    service.end(service.ids("admitted")[0])
    service.run_passes()
    assert service.in_use() == 2
    service.end(*service.ids("admitted"))
    service.run_passes()
    assert service.in_use() == 0
    assert len(service.ids("queued")) == 3


def test_a_full_group_hides_no_other(service: Service) -> None:
    """A10, with 10,000 waiting in the full one."""
    service.add(*(f"full{n}" for n in range(10_000)), group="full")
    service.add("one", group="other")
    service.run_passes()
    service.sent()
    service.apply(
        service.reply(ReplyGroup(group="other", permits=1), blocked=(Blocked(group="full", reason="group_limit"),))
    )
    assert service.ids("admitted") == ["one"]
    account = service.account()
    assert account is not None
    assert account.blocked == {"full": "group_limit"}


def test_pause_admits_nothing_and_resume_needs_no_enqueue(service: Service) -> None:
    """A13: a lease that is taken away admits nothing more; running work goes on; what waits goes on with Resume."""
    service.add("first")
    service.run_passes()
    service.lease(2)
    service.change("first", state="running", run_token="r")
    service.sent()
    paused = (Blocked(group="", reason="paused"),)
    service.apply(service.reply(ReplyGroup(permits=0), ack_wanted=True, blocked=paused))
    service.add("second")
    service.run_passes()
    assert service.ids("queued") == ["second"]
    assert service.row("first").state == "running"
    assert service.account().blocked == {"": "paused"}  # type: ignore[union-attr]
    service.lease(2)
    assert service.ids("admitted") == ["second"]


def test_a_refusal_costs_no_attempt(service: Service) -> None:
    """A27."""
    service.add("op")
    for _ in range(3):
        service.run_passes()
        service.sent()
        service.apply(service.reply(blocked=(Blocked(group="", reason="account_limit"),)))
    row = service.row("op")
    assert (row.state, row.attempt, row.sends, row.worker_losses) == ("queued", 1, 0, 0)
    assert service.count("attempts") == 0


def test_first_come_first_served_in_a_group_and_priority_first(service: Service) -> None:
    """A31: by order of insertion, within a millisecond too."""
    service.add(*(f"op{n}" for n in range(5)), group="g")
    service.add("urgent", group="g", priority=5)
    service.run_passes()
    order = []
    service.lease(1, group="g")
    for _ in range(6):
        (running,) = service.ids("admitted")
        order.append(running)
        service.end(running)
        service.run_passes()
    assert order == ["urgent", "op0", "op1", "op2", "op3", "op4"]
    assert service.handed[0].id == "urgent"


def test_many_are_admitted_over_several_passes(database_url: str) -> None:
    """More than pass_admit_max at once: the rest follows without a wake."""
    service = Service(database_url, pass_admit_max=3)
    service.add(*(f"op{n}" for n in range(8)))
    service.run_passes()
    service.lease(8)
    assert service.in_use() == 3
    service.run_passes()
    assert service.in_use() == 8
    service.close()


def test_more_wait_than_are_counted(database_url: str) -> None:
    """A30: operations are counted up to 1,000, and as many are admitted: those behind them are not forgotten."""
    service = Service(database_url, pass_admit_max=100_000)
    service.add(*(f"op{n}" for n in range(1_300)))
    service.run_passes()
    service.lease(1_016)
    service.run_passes()
    assert service.in_use() == 1_016
    report = service.report()
    assert report is not None
    assert [(one.claimed - one.released, one.waiting) for one in report.groups] == [(1_016, 284)]
    service.close()


def test_an_account_with_ten_thousand_groups_works(service: Service) -> None:
    """A38: report and row stay bounded."""
    groups = [f"g{n:05}" for n in range(10_000)]
    with service.database.transaction() as connection:
        connection.execute(
            insert(service.tables.operations).values(enqueued_at=now_ms()),
            [
                {"id": one, "account": "acme", "group": one, "queue": "q", "task": "t", "state": "queued"}
                for one in groups
            ],
        )
        connection.execute(insert(service.tables.wakes), [{"account": "acme"}])
    service.run_passes()
    report = service.sent()
    assert report is not None
    assert len(report.groups) == 200
    service.apply(service.reply(*(ReplyGroup(group=one.group, permits=1) for one in report.groups)))
    assert service.in_use() == 200
    account = service.account()
    assert account is not None
    assert len(account.state) < 200_000


def test_an_idle_account_leaves_no_row(database_url: str) -> None:
    """E9: a lease that is not used goes back, and the answered account's row is deleted."""
    service = Service(database_url, idle_return_s=0.05)
    passes = service.passes()
    service.add("op")
    service.run_passes(passes)
    service.lease(1)
    service.end("op")
    until(lambda: service.run_passes(passes) or (service.report() and not service.report().groups))  # type: ignore[union-attr,func-returns-value]
    service.sent()
    service.apply(service.reply())
    until(lambda: service.run_passes(passes) or service.account() is None)  # type: ignore[func-returns-value]
    assert service.count("wakes") == 0
    service.close()


def test_the_report_says_the_smallest_that_was_declared(service: Service) -> None:
    """E2, on one client's side."""
    with service.database.transaction() as connection:
        service.insert(connection, ["a", "b"], wakes=False)
        rows = [("limit", 5), ("limit", 3), ("group_limit", 2), ("mutex", None)]
        for name, value in rows:
            connection.execute(insert(service.tables.wakes), [{"account": "acme", name: value}])
    service.run_passes()
    report = service.report()
    assert report is not None
    assert (report.declared.limit, report.declared.group_limit, report.declared.mutex) == (3, 2, False)


# One transaction, and what becomes of it


def test_a_rollback_leaves_everything_as_it_was(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """B1: report and state change commit together; a rollback sends nothing and loses no wake."""
    service.add("op")
    service.run_passes()
    service.sent()
    reply = service.reply(ReplyGroup(permits=1), ack_wanted=True)
    with service.database.engine.connect() as connection:
        service.passes().apply_replies(connection, [reply])
        connection.rollback()
    assert service.ids("queued") == ["op"]
    assert service.report() is None
    service.add("other", account="zeta")
    monkeypatch.setattr(outbox, "stage", lambda *_: (_ for _ in ()).throw(RuntimeError("crash")))
    assert service.passes().step() is not None
    assert service.count("wakes") == 1
    assert service.account("zeta") is None
    monkeypatch.undo()
    service.run_passes()
    assert service.report("zeta") is not None
    service.apply(reply)
    assert service.ids("admitted") == ["op"]


def test_a_newer_report_survives_the_acknowledgement_of_the_older(service: Service) -> None:
    """B3."""
    service.add("first")
    service.run_passes()
    with service.database.transaction() as connection:
        sent = outbox.claim(connection, service.tables.outbox, limit=10, hold_ms=60_000)
    service.add(*(f"more{n}" for n in range(5)))
    service.run_passes()
    newer = service.report()
    assert newer is not None
    assert newer.seq > json.loads(sent[0].body)["seq"]
    with service.database.transaction() as connection:
        assert outbox.delivered(connection, service.tables.outbox, sent) == 0
    assert service.report() == newer


def test_one_failing_account_stops_no_other(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """F5: it fails alone, is said, and is tried again later."""
    fail_for(monkeypatch, "bad")
    for account in ("apple", "bad", "zebra"):
        service.add(account, account=account)
    passes = service.passes()
    with caplog.at_level(logging.ERROR):
        service.run_passes(passes)
    assert service.report("apple") is not None
    assert service.report("zebra") is not None
    assert service.report("bad") is None
    assert "account 'bad': its pass failed: ValueError: no such thing" in caplog.text
    pause_s = passes.step()
    assert pause_s is not None
    assert 0 < pause_s <= 1.0
    monkeypatch.undo()
    until(lambda: (passes.step(), service.report("bad"))[1])


def test_a_failed_account_that_needs_no_pass_any_more_is_forgotten(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop must not spin for its sake."""
    monkeypatch.setattr(passes_module, "plan", lambda *_, **__: 1 / 0)
    service.add("op")
    passes = service.passes()
    pause_s = passes.step()
    assert pause_s is not None
    with service.database.transaction() as connection:
        connection.execute(service.tables.wakes.delete())
    until(lambda: passes.step() == float("inf"))


@pytest.mark.parametrize("found_by", ["wake", "due"])
def test_many_failing_accounts_stop_no_other(database_url: str, monkeypatch: pytest.MonkeyPatch, found_by: str) -> None:
    """F5: more of them than one batch has room for, and all longer overdue."""
    service = Service(database_url, pass_accounts_max=2)
    passes, bad = service.passes(), [f"bad{number}" for number in range(5)]
    for account in (*bad, "zebra"):
        service.add(account, account=account)
    service.run_passes(passes)
    service.sent("zebra")
    real = passes_module.plan
    monkeypatch.setattr(
        passes_module,
        "plan",
        lambda state, *rest, **more: 1 / (state.account == "zebra") and real(state, *rest, **more),
    )
    for account in (*bad, "zebra"):
        service.add(f"{account} again", account=account, wakes=found_by == "wake")
    accounts = service.tables.accounts
    with service.database.transaction() as connection:
        due_at = case((accounts.c.account == "zebra", 2), else_=1)
        connection.execute(update(accounts).values(due_at=due_at if found_by == "due" else None))
    until(lambda: (passes.step(), service.report("zebra"))[1], 10)
    service.close()


def test_one_failing_reply_stops_no_other(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """B13, for replies: the holder repeats what was not acknowledged."""
    for account in ("apple", "bad", "zebra"):
        service.add(account, account=account)
    service.run_passes()
    fail_for(monkeypatch, "bad")
    service.apply(*(service.reply(ReplyGroup(permits=1), account=one) for one in ("apple", "bad", "zebra")))
    assert service.ids("admitted") == ["apple", "zebra"]


def test_of_several_replies_the_newest_counts(service: Service) -> None:
    """Rule 5: the others are as if lost, in any order; one for another incarnation is nothing."""
    service.add("a", "b", "c")
    service.run_passes()
    older, newer = service.reply(ReplyGroup(permits=3)), service.reply(ReplyGroup(permits=1))
    foreign = service.reply(ReplyGroup(permits=3), version=99).model_copy(update={"incarnation": "another"})
    service.apply(newer, older, foreign)
    assert service.in_use() == 1
    service.apply(older)
    assert service.in_use() == 1
    assert json.loads(service.account().reply)["version"] == newer.version  # type: ignore[union-attr]


def test_a_reply_for_an_account_without_a_row_is_answered(service: Service) -> None:
    """Section 7: the row is created where missing, also to answer a reply; A43: it gives nothing in that very pass."""
    service.apply(service.reply(ReplyGroup(permits=3), account="unknown", answers=0))
    report = service.report("unknown")
    assert report is not None
    assert report.ack is not None
    assert all(one.claimed == one.released for one in report.groups)


def test_a_reply_that_answers_the_future_shows_a_restored_database(service: Service) -> None:
    """A19: the counter of reports goes past what the lost life has drawn, and the permits are void."""
    service.add("op")
    service.run_passes()
    service.lease(1)
    service.add("next")
    service.apply(service.reply(ReplyGroup(permits=5), answers=1_000))
    assert service.newest_seq() > 1_000
    report = service.report()
    assert report is not None
    assert report.seq > 1_000


def test_a_restored_database_voids_what_it_was_given(service: Service) -> None:
    """A19: noticed by the offsets, before anything is admitted. What the code declares stays."""
    service.add("op")
    with service.database.transaction() as connection:
        wake_declaring(connection, service.tables, {"acme": Declared(limit=7, mutex=True)})
    service.run_passes()
    service.lease(3)
    seq = service.newest_seq()
    service.sent()
    with service.database.transaction() as connection:
        service.passes().restored(connection)
    service.add("next")
    service.run_passes()
    assert service.ids("queued") == ["next"]
    report = service.report()
    assert report is not None
    assert report.seq > seq + 1_000_000
    assert [(one.claimed - one.released, one.waiting) for one in report.groups] == [(1, 1)]
    assert report.declared == Declared(limit=7, mutex=True)


# Two dispatchers, and others' transactions


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
    until(lambda: passes.step() is None)
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
            until(lambda: _waiting_for_locks(service) > 0)
            assert not applying.done()
        applying.result(20)
    assert service.in_use() == 2
    assert service.count("wakes") == 0


def test_a_poisoned_reply_makes_no_deadlock(postgresql: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """B13: accounts that are done one by one, since one of them fails, keep the locks of all: another dispatcher that
    came between would wait for the counter of reports while this one waits for its account."""
    service, other = postgresql, postgresql.again()
    for account in ("apple", "bad", "zebra"):
        service.add(account, account=account)
    service.run_passes()
    fail_for(monkeypatch, "bad")
    replies = [service.reply(ReplyGroup(permits=1), account=one, ack_wanted=True) for one in ("apple", "bad", "zebra")]
    late = other.reply(ReplyGroup(permits=1), account="zebra", ack_wanted=True, version=1_000)
    real = outbox.stage
    with ThreadPoolExecutor(1) as threads:
        applying: list[Future[None]] = []

        def between(connection: Any, table: Any, staged: Any) -> None:
            real(connection, table, staged)
            if [one.key for one in staged] == ["apple"] and not applying:
                applying.append(threads.submit(other.apply, late))
                until(lambda: _waiting_for_locks(service) > 0)

        monkeypatch.setattr(outbox, "stage", between)
        service.apply(*replies)
        applying[0].result(20)
    assert service.ids("admitted") == ["apple", "zebra"]


def _waiting_for_locks(service: Service) -> int:
    statement = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with service.database.reading() as connection:
        return int(connection.execute(text(statement)).scalar_one())


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


def test_two_dispatchers_lose_no_wake_and_keep_the_bound(database_url: str) -> None:
    """A30, A41, B11: enqueues, settles, replies and two dispatchers' passes at once; every operation gets through."""
    service = Service(database_url, idle_return_s=600)
    accounts, each, limit = ["a", "b", "c"], 25, 2
    done, stop = threading.Event(), threading.Event()
    highest = dict.fromkeys(accounts, 0)

    def enqueue(own: Service, account: str) -> None:
        for n in range(each):
            own.add(f"{account}{n}", account=account, group=f"g{n % 2}")

    def work(own: Service) -> None:
        while not done.is_set():
            for account in accounts:
                admitted = own.ids("admitted", account=account)
                highest[account] = max(highest[account], len(admitted))
                if admitted:
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
            until(lambda: len(service.ids("succeeded")) == len(accounts) * each, 60)
        finally:
            done.set()
            stop.set()
        for one in running:
            one.result(20)
    assert all(0 < most <= 2 * limit for most in highest.values())
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


# Cost


def test_the_statements_of_a_pass_do_not_grow_with_accounts_or_groups(postgresql: Service) -> None:
    """One statement of a kind, however many accounts: what grows is the rows."""
    service = postgresql
    passes = service.passes()

    def statements(accounts: list[str]) -> int:
        for account in accounts:
            for group in ("x", "y"):
                service.add(f"{account}-{group}-{time.monotonic_ns()}", account=account, group=group)
        with counted_statements(service.database) as counted:
            assert passes.step() is None
        return len(counted)

    names = [f"n{n:02}" for n in range(30)]
    statements(names)
    for name in names:
        service.sent(name)
    service.apply(
        *(
            service.reply(ReplyGroup(group="x", permits=9), ReplyGroup(group="y", permits=9), account=one)
            for one in names
        )
    )
    one, many = statements(names[:1]), statements(names)
    assert one == many
    assert many <= 14, "begin, savepoints, lock, wakes, clock, counts, admission and the account rows"


def test_a_pass_reads_no_more_rows_however_many_wait(postgresql: Service) -> None:
    """A29: with 20,000 waiting it reads by index, and of what waits only up to the cap of the counts."""
    service = postgresql
    operations = service.tables.operations
    waiting = (
        f'INSERT INTO {operations.name} (id, task, account, "group", queue, state, enqueued_at) '
        "SELECT 'op' || n, 't', 'acme', '', 'celery', 'queued', n FROM generate_series(1, 20000) n"
    )
    with service.database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(waiting))
        connection.execute(text("VACUUM ANALYZE"))
    service.add("last")
    read: list[tuple[int, int]] = []
    statement = f"SELECT seq_tup_read, idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = '{operations.name}'"

    def note(connection: Any) -> None:
        read.append(tuple(connection.exec_driver_sql(statement).one()))

    passes = service.passes()
    event.listen(service.database.engine, "commit", note)
    try:
        assert passes.step() is None
        service.lease(2)
    finally:
        event.remove(service.database.engine, "commit", note)
    assert service.in_use() == 2
    assert len(read) >= 2
    assert all(by_scan == 0 and by_index < 1_100 for by_scan, by_index in read), read


# Identity


def test_one_database_belongs_to_one_client(service: Service) -> None:
    with service.database.transaction() as connection:
        assert client_identity(connection, service.tables, "billing") == ("billing", service.incarnation)
        with pytest.raises(ConfigurationError, match="belongs to client_id 'billing'"):
            client_identity(connection, service.tables, "shipping")


def test_processes_that_race_agree_on_one_incarnation(database_url: str) -> None:
    service = Service(database_url)
    with service.database.transaction() as connection:
        connection.execute(service.tables.client.delete())

    def identity(own: Service) -> str:
        with own.database.transaction() as connection:
            return client_identity(connection, own.tables, "billing")[1]

    with ThreadPoolExecutor(4) as threads:
        found = set(threads.map(identity, [service.again() for _ in range(4)]))
    assert len(found) == 1
    with service.database.reading() as connection:
        assert connection.execute(select(service.tables.client.c.incarnation)).scalar_one() == found.pop()
    service.close()
