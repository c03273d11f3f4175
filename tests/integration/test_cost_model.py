"""What an operation costs the service's database, and how many messages: the table in docs/performance.md.

One process makes every step once, on PostgreSQL, so that each statement and each written row can be counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import psycopg
import pytest
from celery import Celery
from psycopg.pq import TransactionStatus
from sqlalchemy import text

from celery_durable import DurableTask, using
from celery_durable.permits.messages import ReplyGroup
from celery_durable.store.attempts import Attempt, Attempts, Ending
from celery_durable.store.bell import Work
from tests.dispatching import Service

pytestmark = pytest.mark.postgresql

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
TABLES = ("operations", "payloads", "wakes", "accounts", "attempts", "untold", "outbox")
MANY = 50


@dataclass
class Cost:
    """What was spent meanwhile."""

    statements: int = 0
    commits: int = 0
    """Transactions that wrote something."""
    rows: int = 0
    """Rows inserted, updated or deleted."""
    messages: int = 0
    """Reports to the holder."""


class Costs:
    """Counts what this process has its database do."""

    def __init__(self, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
        self._service = service
        self._cost = Cost()
        self._counts = False
        execute, executemany, commit = psycopg.Cursor.execute, psycopg.Cursor.executemany, psycopg.Connection.commit

        def counted_execute(cursor: Any, query: Any, *args: Any, **options: Any) -> Any:
            self._note(cursor.connection, query, 1)
            return execute(cursor, query, *args, **options)

        def counted_executemany(cursor: Any, query: Any, params_seq: Any, **options: Any) -> Any:
            self._note(cursor.connection, query, len(params_seq))
            return executemany(cursor, query, params_seq, **options)

        def counted_commit(connection: Any) -> None:
            self._cost.commits += self._counts and connection.info.transaction_status == TransactionStatus.INTRANS
            commit(connection)

        monkeypatch.setattr(psycopg.Cursor, "execute", counted_execute)
        monkeypatch.setattr(psycopg.Cursor, "executemany", counted_executemany)
        monkeypatch.setattr(psycopg.Connection, "commit", counted_commit)
        with service.database.transaction() as connection:
            connection.execute(text("CREATE TABLE written (name text, what text)"))
            connection.execute(
                text(
                    "CREATE FUNCTION note_row() RETURNS trigger LANGUAGE plpgsql AS "
                    "$$BEGIN INSERT INTO written VALUES (TG_TABLE_NAME, TG_OP); RETURN NULL; END$$"
                )
            )
            for name in TABLES:
                table = getattr(service.tables, name).name
                connection.execute(
                    text(
                        f"CREATE TRIGGER note_row AFTER INSERT OR UPDATE OR DELETE ON {table} "
                        "FOR EACH ROW EXECUTE FUNCTION note_row()"
                    )
                )

    @contextmanager
    def counted(self) -> Iterator[Cost]:
        """What is done meanwhile."""
        self._written()
        self._cost = cost = Cost()
        self._counts = True
        yield cost
        self._counts = False
        written = self._written()
        cost.rows = written.total()
        cost.messages = written[self._service.tables.outbox.name, "INSERT"]

    def _note(self, connection: Any, query: Any, count: int) -> None:
        if not self._counts:
            return
        self._cost.statements += count
        reads = str(query).split(maxsplit=1)[0].upper() == "SELECT" or "RECURSIVE" in str(query)
        self._cost.commits += connection.autocommit and not reads

    def _written(self) -> Counter[tuple[str, str]]:
        with self._service.database.transaction() as connection:
            rows = connection.execute(text("DELETE FROM written RETURNING name, what")).all()
        return Counter((row.name, row.what) for row in rows)


def body(number: int) -> int:
    return number


class World:
    """One service whose parts are stepped by hand."""

    def __init__(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.service = Service(url)
        self.app = Celery("billing", broker="memory://", set_as_current=False)
        self.app._celery_durable_runtime = self.service.runtime  # type: ignore[attr-defined]
        self.service.runtime.bell._silent_until_s = dict.fromkeys(get_args(Work), float("inf"))
        self.task = self.app.task(base=DurableTask, name="t", shared=False)(body)
        self.gated = self.app.task(base=DurableTask, name="g", shared=False, account="acme")(body)
        self.passes = self.service.passes()
        self.delivery = self.service.delivery(self.app)
        self.attempts = Attempts(self.service.database, self.service.tables, self.service.runtime.bell)
        self.costs = Costs(self.service, monkeypatch)

    def deliver(self) -> None:
        """What was admitted is handed over and sent; what is due in SQL too."""
        self.delivery._look_at_s = 0.0
        self.delivery._counted.clear()  # what it counts five times a second at most is counted in each of these
        self.delivery.hand_over(self.service.handed)
        self.service.handed.clear()
        assert self.delivery.step() is None

    def work(self, *ids: str) -> None:
        """A worker starts the operations, and they succeed."""
        for one in ids:
            attempt = Attempt(one, 1, 1, f"token-{one}")
            started = self.attempts.start(attempt, worker="w", timeout_ms=60_000)
            assert started
            attempt = replace(attempt, has_account=started.has_account)
            assert self.attempts.succeed(attempt, Ending("application/json", "utf-8", b"1")) == "succeeded"


@pytest.fixture
def world(postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(postgresql_url, monkeypatch)
    for _ in range(2):  # what is asked once in a process is asked now
        one = world.task.delay(0)
        world.deliver()
        world.work(one.id)
    yield world
    world.service.database.drop_held()
    world.service.close()


def stated(name: str) -> list[str]:
    """The cells of a row of the page's table."""
    [row] = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in row.split("|")[2:-1]]


def check(name: str, cost: Cost) -> None:
    found = [str(value) for value in (cost.statements, cost.commits, cost.rows, cost.messages)]
    assert found == stated(name), f"{name}: change the page if that is what it is to cost"


def spent(world: World, act: Callable[[], object]) -> Cost:
    with world.costs.counted() as cost:
        act()
    return cost


def test_without_an_account(world: World) -> None:
    one = []
    check("enqueue", spent(world, lambda: one.append(world.task.delay(1).id)))
    check("deliver one that is due", spent(world, world.deliver))
    check("start and settle", spent(world, lambda: world.work(*one)))
    world.task.enqueue_many([(number,) for number in range(MANY)])
    ids = world.service.ids("admitted")
    check(f"deliver {MANY} that are due", spent(world, world.deliver))
    check(f"start and settle {MANY}", spent(world, lambda: world.work(*ids)))


def test_in_a_transaction_of_the_callers(world: World) -> None:
    def enqueue(calls: int) -> None:
        with world.service.database.engine.begin() as connection, using(connection):
            for number in range(calls):
                world.task.delay(number)

    enqueue(1)  # asks whose database it is
    check("enqueue one in a caller's transaction", spent(world, lambda: enqueue(1)))
    check("enqueue 100 in a caller's transaction", spent(world, lambda: enqueue(100)))


def test_with_a_warm_lease(world: World) -> None:
    service = world.service
    first = world.gated.delay(0)
    world.passes.step()
    service.lease(5)
    service.handed.clear()
    service.change(first.id, state="succeeded", ended_at="now")
    service.run_passes(world.passes)
    service.sent()
    one = []
    check("enqueue, with an account", spent(world, lambda: one.append(world.gated.delay(1).id)))
    check("the pass that admits it, of a warm lease", spent(world, world.passes.step))
    check("deliver one that was handed over", spent(world, world.deliver))
    check("start and settle, with an account", spent(world, lambda: world.work(*one)))
    check("the pass after it", spent(world, world.passes.step))


def test_under_contention(world: World) -> None:
    """Limit 1, others wait, and more wait here: the permit goes back, and comes again with a reply."""
    service = world.service
    for number in range(6):
        world.gated.delay(number)
    world.passes.step()
    service.lease(1, turn_ms=1)
    [running] = service.ids("admitted")
    world.deliver()
    world.work(running)
    time.sleep(0.005)  # its turn is over
    check("the pass that gives a permit back", spent(world, world.passes.step))
    service.sent()
    reply = service.reply(ReplyGroup(permits=1, turn_ms=1))
    check("the reply that brings the next one", spent(world, lambda: service.apply(reply, passes=world.passes)))
    assert len(service.handed) == 1
