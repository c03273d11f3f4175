"""Accounts that a hundred thousand operations wait for, and accounts that everybody works on at once, on PostgreSQL."""

from __future__ import annotations

import itertools
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from psycopg import ClientCursor
from sqlalchemy import func, select, text

from celery_durable.dispatcher.passes import Passes
from celery_durable.permits.messages import ReplyGroup
from celery_durable.store.accounts import Accounts, wake
from celery_durable.store.attempts import Attempt, Attempts, Ending
from celery_durable.store.operations import Operations
from celery_durable.store.schema import PERMIT_STATES
from tests.dispatching import Service, counted_statements, noted_statements
from tests.effort import instructions
from tests.harness import wait_until

pytestmark = pytest.mark.postgresql

MANY = 100_000


@pytest.fixture
def service(postgresql_url: str) -> Iterator[Service]:
    service = Service(postgresql_url, idle_return_s=600)
    yield service
    service.close()


def let_wait(service: Service, number: int, account: str = "acme") -> None:
    """So many operations wait in the account, as enqueued one by one, and the planner knows of them."""
    operations, wakes = service.tables.operations, service.tables.wakes
    with service.database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(
            text(
                f'INSERT INTO {operations.name} (id, task, account, "group", queue, state, enqueued_at) '
                f"SELECT '{account}' || n, 't', '{account}', '', 'celery', 'queued', n FROM generate_series(1, :n) n"
            ),
            {"n": number},
        )
        connection.execute(
            text(f"INSERT INTO {wakes.name} (account) SELECT '{account}' FROM generate_series(1, 10)"), {}
        )
        connection.execute(text("VACUUM ANALYZE"))


@contextmanager
def pages_read(service: Service) -> Iterator[Counter[str]]:
    """How many pages each kind of statement reads meanwhile: each is executed once more, explained, and undone."""
    found: Counter[str] = Counter()

    def explain(cursor: Any, statement: str, parameters: Mapping[str, Any]) -> None:
        explained = ClientCursor(cursor.connection)
        in_transaction = not cursor.connection.autocommit
        if in_transaction:
            explained.execute("SAVEPOINT explained")
        explained.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters)
        ((((plan,),),)) = (explained.fetchone(),)  # type: ignore[misc]
        if in_transaction:
            explained.execute("ROLLBACK TO SAVEPOINT explained")
        root = plan["Plan"]
        found[" ".join(statement.split())[:60]] += root["Shared Hit Blocks"] + root["Shared Read Blocks"]

    def note(_c: Any, cursor: Any, statement: str, parameters: Any, _x: Any, _many: bool) -> None:
        if statement.split(maxsplit=1)[0].upper() in ("SELECT", "WITH", "UPDATE", "DELETE", "INSERT"):
            for one in parameters if isinstance(parameters, list) else [parameters]:
                explain(cursor, statement, one)

    with noted_statements(service.database, note):
        yield found


def pages_of_work(service: Service, account: str, passes: Passes) -> int:
    """The pages that a first report, a reply with a lease of 2, a settle and the pass after it read."""
    with service.database.transaction() as connection:
        service.insert(
            connection, [f"first of {account}", f"second of {account}", f"third of {account}"], account=account
        )
    with pages_read(service) as pages:
        assert passes.step() is None
        service.lease(2, account=account)
        service.end(service.ids("admitted", account=account)[0])
        assert passes.step() is None
    assert service.in_use(account) == 2
    assert any("RECURSIVE gone" in statement for statement in pages), "what is so of the account was read"
    return pages.total()


def test_a_pass_costs_the_same_however_many_wait(service: Service) -> None:
    """A29: with 100,000 waiting it reads what it does with 100, but for what is counted (1,000) and a deeper index."""
    passes = service.passes()
    let_wait(service, 100, "few")
    few = pages_of_work(service, "few", passes)
    let_wait(service, MANY, "many")
    many = pages_of_work(service, "many", passes)
    assert many < 1.6 * few, f"{few} pages with 100 waiting, {many} with {MANY}"


def test_a_saturated_account_delays_no_other(service: Service) -> None:
    """A28: with 100,000 waiting on a full account, an unrelated one reads as little, and has its turn in two passes."""
    passes = service.passes()
    alone = pages_of_work(service, "alone", passes)
    let_wait(service, MANY, "full")
    service.run_passes(passes)
    service.lease(1, account="full")
    service.run_passes(passes)
    assert pages_of_work(service, "beside", passes) < 1.6 * alone

    narrow = service.again(pass_accounts_max=2).passes()
    for number in range(20):
        with service.database.transaction() as connection:
            wake(connection, service.tables, ["full"] * 5)
        service.add(f"unrelated {number}", account=f"unrelated {number}")
        for _ in range(2):
            narrow.step()
            with service.database.transaction() as connection:
                wake(connection, service.tables, ["full"] * 5)
        assert service.report(f"unrelated {number}") is not None
    assert service.in_use("full") == 1


def effort_of_admission(service: Service, passes: Passes, account: str, beside: str) -> tuple[int, int, int]:
    """From an account's first call to its admission, while another account is woken all the time.

    Returns steps of the passes, SQL statements, and instructions of this process.
    """
    taken = 0

    def step_until(condition: Callable[[], object]) -> None:
        nonlocal taken
        while not condition():
            assert taken < 10, f"{account} is not served"
            with service.database.transaction() as connection:
                wake(connection, service.tables, [beside] * 5)
            passes.step()
            taken += 1

    def admit() -> None:
        service.add(f"call of {account}", account=account)
        step_until(lambda: service.report(account))
        service.apply(service.reply(ReplyGroup(permits=1), account=account), passes=passes)
        step_until(lambda: service.in_use(account))

    with counted_statements(service.database) as statements:
        executed = instructions(admit)
    return taken, len(statements), executed


def test_the_way_to_a_permit_is_no_longer_beside_a_saturated_account(service: Service) -> None:
    """A28: admission beside an account where 100,000 wait takes the steps, statements and work that it does beside 100.

    Passes of two accounts each, so that the full one, which is always woken, is in every one.
    """
    service = service.again(pass_accounts_max=2)
    passes = service.passes()
    efforts = {}
    for name, number in (("few", 100), ("many", MANY)):
        let_wait(service, number, name)
        service.run_passes(passes)
        service.lease(1, account=name)
        service.run_passes(passes)
        assert service.in_use(name) == 1
        # What is done for the first time here, such as a statement's compilation, is no account's doing.
        effort_of_admission(service, passes, f"first beside {name}", name)
        efforts[name] = effort_of_admission(service, passes, f"second beside {name}", name)
        assert (service.in_use(name), len(service.ids("queued", account=name))) == (1, number - 1)
    few, many = efforts["few"], efforts["many"]
    assert many[:2] == few[:2], "steps and statements"
    assert many[2] < 1.1 * few[2], f"{few[2]} instructions beside 100 that wait, {many[2]} beside {MANY}"


class Crowd:
    """All that work on one account at once, each in a thread and with connections of its own."""

    QUOTA: Mapping[str, int] = {"calls": 20, "settles": 30, "cancels": 15, "looks": 50}
    """What happens at least in one run."""

    def __init__(self, service: Service, permits: Mapping[str, int]) -> None:
        self.service = service
        self.permits = permits
        self.dice = random.Random(30)
        self.done: Counter[str] = Counter()
        self.numbers = itertools.count()
        self.operations = Operations(service.tables, "postgresql", psycopg=True)

    def run(self, passes: Sequence[tuple[Service, Passes]]) -> None:
        """All at once until the quota is reached, with the passes in loops that never pause."""
        self.done.clear()
        stop = threading.Event()

        def over_and_over(own: Service, what: Callable[[Service], object]) -> None:
            try:
                while not stop.is_set():
                    what(own)
            finally:
                own.database.drop_held()

        roles = [self.calls, self.works, self.works, self.cancels, self.hears, self.looks]
        with ThreadPoolExecutor(len(roles) + len(passes)) as threads:
            running = [threads.submit(over_and_over, self.service.again(), role) for role in roles]
            running += [threads.submit(over_and_over, own, partial(_step, each)) for own, each in passes]
            try:
                wait_until(
                    lambda: (
                        any(one.done() for one in running)
                        or all(self.done[what] >= number for what, number in self.QUOTA.items())
                    ),
                    60,
                    what=f"{self.done} of {self.QUOTA}",
                )
            finally:
                stop.set()
            for one in running:
                one.result(30)

    def calls(self, own: Service) -> None:
        """Somebody enqueues one."""
        own.add(f"op{next(self.numbers)}", group=self.dice.choice(list(self.permits)))
        self.done["calls"] += 1
        time.sleep(0.005)  # its own pace: the others' locks are what is looked at, not a flood of calls

    def works(self, own: Service) -> None:
        """A worker starts one that is admitted, and ends it."""
        table = own.tables.operations
        columns = (table.c.id, table.c.generation, table.c.attempt)
        chosen = select(*columns).where(table.c.state == "admitted").order_by(func.random()).limit(1)
        with own.database.reading() as connection:
            found = connection.execute(chosen).one_or_none()
        if found is None:
            return
        attempt, attempts = Attempt(*found, token=uuid.uuid4().hex), Attempts(own.database, own.tables)
        if attempts.start(attempt, worker="w", timeout_ms=60_000) is None:
            return
        settle = attempts.succeed if self.dice.random() < 0.8 else attempts.fail
        settle(attempt, Ending())
        self.done["settles"] += 1

    def cancels(self, own: Service) -> None:
        """Somebody cancels one that waits or is admitted, and sometimes thinks again."""
        table = own.tables.operations
        open_ones = select(table.c.id).where(table.c.state.in_(("queued", "admitted"))).order_by(func.random()).limit(1)
        with own.database.engine.connect() as connection:
            chosen = connection.execute(open_ones).scalar_one_or_none()
            if chosen is not None and self.operations.cancel(connection, chosen) == "cancelled":
                time.sleep(0.01)  # the user's transaction stays open: others meet the row that it holds
                if self.dice.random() < 0.3:
                    connection.rollback()
                else:
                    connection.commit()
                    self.done["cancels"] += 1

    def hears(self, own: Service) -> None:
        """The holder says the same in a newer version."""
        groups = [ReplyGroup(group=name, permits=most) for name, most in self.permits.items()]
        own.apply(own.reply(*groups, version=1_000 + next(self.numbers)))
        time.sleep(0.002)  # replies hold the account's lock: without a pause no pass would ever have it

    def looks(self, own: Service) -> None:
        """One look at the account: nobody sees more in use than there are permits, or anything go back."""
        own.look("acme", sum(self.permits.values()), self.permits)
        self.done["looks"] += 1


def _step(passes: Passes, _own: Service) -> None:
    passes.step()


def in_use(service: Service) -> dict[str, int]:
    """Operations with a permit by group, in one statement."""
    operations = service.tables.operations
    statement = (
        select(operations.c.group, func.count())
        .where(operations.c.state.in_(PERMIT_STATES), operations.c.account == "acme")
        .group_by(operations.c.group)
    )
    with service.database.reading() as connection:
        return {str(group): int(count) for group, count in connection.execute(statement)}


def test_passes_in_a_tight_loop_beside_everything_else(service: Service) -> None:
    """A30: claims, settles, cancels and rollbacks at once: the bound holds, and then no free permit stays unused."""
    permits = {"wide": 4, "narrow": 2}
    crowd = Crowd(service, permits)
    passes = [(own, own.passes()) for own in (service.again(), service.again())]
    for turn in range(3):
        for group in permits:
            service.add(*(f"{group} {turn}-{number}" for number in range(150)), group=group)
        if turn == 0:
            service.run_passes()
            service.sent()
            service.apply(service.reply(*(ReplyGroup(group=name, permits=most) for name, most in permits.items())))
        crowd.run(passes)
        assert all(service.ids("queued", group=group) for group in permits)
        # Nobody wakes the account any more: a wake that was lost in the crowd would leave a permit unused.
        wait_until(lambda: (passes[0][1].step(), in_use(service) == permits)[1], 20, what="every permit is used")
    service.invariants.require("bound", "group bound", "ack", "seq")


def test_a_release_while_a_pass_counts_is_seen_by_the_next(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A30: a settle commits right after the counts were read: its wake is left for a pass that uses the permit."""
    service.add("runs", "waits")
    service.run_passes()
    service.lease(1)
    service.run_passes()
    own, other = service.again(), service.again()
    facts = Accounts.facts
    ended: list[str] = []

    def then_it_ends(*arguments: Any) -> Any:
        found = facts(*arguments)
        if not ended:
            ended.append("runs")
            other.end("runs")
        return found

    monkeypatch.setattr(Accounts, "facts", then_it_ends)
    service.add("another")
    own.run_passes()
    assert ended
    assert service.ids("admitted") == ["waits"]


def test_a_stale_reply_and_a_first_call_at_the_same_time(service: Service) -> None:
    """A41: one dispatcher answers an old reply, another makes the account's row at that moment: nothing is let in."""
    one, other = service.again(), service.again()
    service.add("before", account="before")
    service.run_passes()
    with ThreadPoolExecutor(2) as threads:
        for number in range(25):
            account, barrier = f"race {number}", threading.Barrier(2)
            stale = service.reply(ReplyGroup(permits=3), account=account, answers=0)

            def answer() -> None:
                barrier.wait(10)  # noqa: B023 - ends within its turn
                one.apply(stale)  # noqa: B023

            def make() -> None:
                barrier.wait(10)  # noqa: B023
                other.add(f"op {account}", account=account)  # noqa: B023
                other.run_passes()

            for running in [threads.submit(answer), threads.submit(make)]:
                running.result(30)
            service.run_passes()
            assert service.in_use(account) == 0
            report = service.report(account)
            assert report is not None
            assert [(group.waiting, group.keeps) for group in report.groups] == [(1, 0)]
            # What answers that report gives.
            service.lease(1, account=account)
            assert service.in_use(account) == 1
