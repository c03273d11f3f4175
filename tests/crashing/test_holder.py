"""A holder kills itself at each of its crash points, in the middle of a rebuild too, and is started again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Table, text, update

from celery_durable import commands
from celery_durable.crashpoints import POINTS
from celery_durable.store.database import Database
from celery_durable.store.migrate import migrate
from holder_service.migrations import HOLDER
from holder_service.rebuild import ALIVE_EVERY_S, REBUILDER_SILENT_MS
from holder_service.store import HolderTables, build_tables
from tests.crashing import rig
from tests.crashing.conftest import PUBLISH_MS, SESSION_MS
from tests.crashing.orders import Orders
from tests.crashing.rig import Expected
from tests.e2e.observe import History
from tests.harness import Process, Service, Stack, wait_until

pytestmark = pytest.mark.processes

LIMIT = 2


class Holders:
    """One holder at a time, that obeys orders, beside a service at work."""

    def __init__(self, stack: Stack, service: Service) -> None:
        self.stack = stack
        self.service = service
        self.orders = Orders(stack.folder / "orders")
        self._holder: Process | None = None

    def one(self) -> Process:
        """The holder, a new one if the last is gone."""
        if self._holder is None or not self._holder.alive:
            settings = {"kafka_session_timeout_ms": SESSION_MS, "kafka_publish_deadline_ms": PUBLISH_MS}
            env = {**self.stack.holder_env(**settings), **self.orders.env}
            command = [sys.executable, "-m", "holder_service.cli", "run"]
            label = f"holder{self.stack.number()}"
            self._holder = self.stack.started(Process(label, command, folder=self.stack.folder, env=env))
        return self._holder

    def work(self, account: str) -> Expected:
        """More operations than the account's limit, in a group that has nothing yet: the holder must be asked."""
        return Expected.of(*(self.service.task("work").apply_async((account,), group="load") for _ in range(4)))

    def change(self, table: Callable[[HolderTables], Table], *, required: bool = True, **values: Any) -> None:
        """Writes columns of all rows of one of the holder's tables."""
        database = Database(self.stack.holder_url)
        try:
            with database.transaction("holder.batch") as connection:
                changed = connection.execute(update(table(build_tables())).values(**values)).rowcount
        finally:
            database.dispose()
        assert changed or not required


def overdue(holders: Holders) -> None:
    """A timer of every account is over."""
    holders.change(lambda tables: tables.accounts, due_at=0)


def cut(holders: Holders) -> None:
    """The topic ends before what the database has read of it: another one took its place."""
    holders.change(lambda tables: tables.offsets, next_offset=1_000_000)


def gone_back(holders: Holders) -> None:
    """The database is as it was before it read anything more."""
    holders.change(lambda tables: tables.offsets, next_offset=0)


def lost(holders: Holders) -> None:
    """The database is new."""
    database, tables = Database(holders.stack.holder_url), build_tables()
    try:
        tables.metadata.drop_all(database.engine)
        with database.transaction("migrate.upgrade") as connection:
            connection.execute(text(f"DROP TABLE {tables.prefix}alembic_version"))
        migrate(database, tables, migrations=HOLDER)
    finally:
        database.dispose()


@dataclass(frozen=True)
class Case:
    """What passes a place.

    :param down: what happens to the database while no holder runs; None: a running one passes it at work.
    :param also: other orders that lead there.
    """

    down: Callable[[Holders], None] | None = None
    also: tuple[str, ...] = ()


CASES = {
    "holder.batch": Case(),
    "holder.timers": Case(overdue),
    "holder.adopt": Case(cut),
    "life.begin": Case(lost),
    "life.new_epoch": Case(gone_back),
    "rebuild.take": Case(lost),
    "rebuild.limits": Case(lost),
    "rebuild.sweep": Case(gone_back),
    "rebuild.replay": Case(lost),
    "rebuild.alive": Case(lost, also=(f"rebuild.take.after_commit:1=sleep:{ALIVE_EVERY_S + 0.1}",)),
    "rebuild.finish": Case(lost),
    "rebuild.give_up": Case(lost, also=("rebuild.replay.before_commit:1=raise",)),
    "relay.claim": Case(),
    "relay.settle": Case(),
    "relay.message": Case(),
    "reader.offset": Case(),
}
CRASHED = [point for point in POINTS if point.rpartition(".")[0] in CASES]
ALSO_REAL = ("holder.batch", "relay.message", "reader.offset")


@pytest.fixture(scope="module")
def holders(module_stack: Stack) -> Holders:
    service = module_stack.service(resend_min_s=1.0, kafka_session_timeout_ms=SESSION_MS)
    holders = Holders(module_stack, service)
    holders.one()
    service.dispatcher()
    service.worker()
    # A command, which a rebuild finds in the topic of limits.
    commands.set_limit("first", LIMIT, by="test", why="a test", app=service.app)
    rig.check(service, holders.work("first"), limit=LIMIT)
    return holders


@rig.on_embedded(CRASHED)
def test_a_holder_killed_at(point: str, holders: Holders) -> None:
    """Cases A16 and B2: what was given stays counted, what waits gets its permits, and the limit holds throughout."""
    case, service, account = CASES[point.rpartition(".")[0]], holders.service, f"at-{point}"
    flag = service.folder / account
    running = service.task("until").delay(account, str(flag))
    wait_until(lambda: History([service]).starts()[running.id], rig.DEADLINE_S, what="a body that runs on")
    holder = holders.one()
    if case.down is None:
        holders.orders.give(point, *case.also)
        expected = holders.work(account)
    else:
        holder.kill()
        case.down(holders)
        expected = holders.work(account)
        holders.orders.give(point, *case.also)
        holder = holders.one()
    rig.dies(holder, holders.orders, point)
    # Whoever rebuilt is waited for before another takes over: that time is over.
    holders.change(lambda tables: tables.database, required=False, changed_at=-REBUILDER_SILENT_MS)
    holders.one()
    rig.ended(service, expected)
    flag.touch()
    rig.check(service, Expected([*expected.ids, running.id]), limit=LIMIT)


@rig.on_real(CRASHED, ALSO_REAL)
def test_a_holder_on_real_services_killed_at(point: str, holders: Holders) -> None:
    """The same at places where PostgreSQL or Apache Kafka may do what SQLite or the mock cluster does not."""
    test_a_holder_killed_at(point, holders)
