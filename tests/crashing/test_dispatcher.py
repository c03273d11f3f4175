"""A dispatcher kills itself at each of its crash points, and is started again."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from sqlalchemy import update

from celery_durable.crashpoints import POINTS
from celery_durable.runtime import runtime_of
from celery_durable.store.attempts import Attempt, Attempts
from celery_durable.store.schema import CANCELLED, ENDED_STATES, FAILED
from celery_durable.store.untold import Untold
from tests.crashing import rig
from tests.crashing.conftest import PUBLISH_MS, SESSION_MS
from tests.crashing.orders import Orders
from tests.crashing.rig import Expected
from tests.e2e.observe import operation, rows
from tests.harness import Process, Service, Stack, wait_until

pytestmark = pytest.mark.processes

LIMIT = 2
PUBLISH_DEADLINE_S = 1.0
DAY_MS = 86_400_000


def work(service: Service, account: str) -> Expected:
    """More than the account's limit at once."""
    return Expected.of(*(service.task("work").delay(account) for _ in range(4)))


def unlimited(service: Service, account: str) -> Expected:
    """Without an account: they are due for delivery from the start."""
    return Expected.of(*(service.task("add").delay(number, 1) for number in range(4)))


def later(service: Service, account: str) -> Expected:
    return Expected.of(*(service.task("work").apply_async((account,), countdown=1.5) for _ in range(2)))


def expired(service: Service, account: str) -> Expected:
    result = service.task("work").apply_async((account,), countdown=60, expires=0.5)
    return Expected.of(result, state=CANCELLED, runs=0)


def lost(service: Service, account: str) -> Expected:
    """An attempt of a worker that was never heard of again."""
    expected = unlimited(service, account)
    runtime = runtime_of(service.app)
    attempt = Attempt(expected.ids[0], generation=1, attempt=1, token=uuid.uuid4().hex)
    started = Attempts(runtime.database, runtime.tables).start(attempt, worker="gone", timeout_ms=200)
    assert started is not None
    return expected


def restored(service: Service, account: str) -> Expected:
    """The database is as it was before any reply was read."""
    change(service, "offsets", next_offset=0)
    return work(service, account)


def long_kept(service: Service, account: str) -> Expected:
    """What has ended did so long ago."""
    runtime = runtime_of(service.app)
    operations = runtime.tables.operations
    old = update(operations).where(operations.c.state.in_(ENDED_STATES))
    with runtime.database.transaction("retention.delete") as connection:
        assert connection.execute(old.values(ended_at=operations.c.ended_at - 30 * DAY_MS)).rowcount
    return work(service, account)


def untold(service: Service, account: str) -> Expected:
    """It has failed, and whoever should have called its errbacks has died."""
    runtime = runtime_of(service.app)
    result = service.task("fail").delay(account)
    wait_until(lambda: operation(service, result.id).state == FAILED, 60, what="its end")
    with runtime.database.transaction("worker.fail") as connection:
        Untold(runtime.tables).mark(connection, [result.id])
    return Expected.of(result, state=FAILED)


def told(service: Service) -> None:
    """Nothing is left to be told."""
    wait_until(lambda: not rows(service, "untold", "operation_id"), 60, what="all is told")


def deleted(service: Service) -> None:
    """What :func:`long_kept` made old is gone, with payload and history."""
    left = len(rows(service, "operations", "id"))
    assert left == 4
    assert len(rows(service, "payloads", "id")) == left
    assert not rows(service, "attempts", "operation_id")


def change(service: Service, table: str, **values: int) -> None:
    """Writes columns of all rows of a table."""
    runtime = runtime_of(service.app)
    with runtime.database.transaction("replies.apply") as connection:
        assert connection.execute(update(getattr(runtime.tables, table)).values(**values)).rowcount


@dataclass(frozen=True)
class Case:
    """What passes a place.

    :param starting: it is passed by a dispatcher that starts, and the load is made while none runs.
    :param also: other orders that lead there.
    :param after: what is to be seen at the end, besides.
    """

    load: Callable[[Service, str], Expected] = work
    limit: int | None = LIMIT
    starting: bool = False
    also: tuple[str, ...] = ()
    after: Callable[[Service], None] = lambda service: None


CASES = {
    "dispatcher.identify": Case(starting=True),
    "passes.step": Case(),
    "replies.apply": Case(),
    "replies.restored": Case(restored, starting=True),
    "delivery.claim": Case(unlimited, limit=None),
    "delivery.put_back": Case(
        unlimited, limit=None, starting=True, also=(f"delivery.message.after_publish:1=sleep:{PUBLISH_DEADLINE_S}",)
    ),
    "recovery.lost": Case(lost, limit=None, starting=True),
    "recovery.expire": Case(expired, limit=None),
    "recovery.promote": Case(later),
    "telling.claim": Case(untold, limit=None, after=told),
    "telling.told": Case(untold, limit=None, after=told),
    "retention.delete": Case(long_kept, starting=True, after=deleted),
    "relay.claim": Case(),
    "relay.settle": Case(),
    "relay.message": Case(),
    "reader.offset": Case(),
    "delivery.message": Case(),
    "events.message": Case(later),
}
CRASHED = [point for point in POINTS if point.rpartition(".")[0] in CASES]
ALSO_REAL = ("passes.step", "replies.apply", "relay.settle", "relay.message", "reader.offset", "delivery.message")
"""Places where PostgreSQL, Apache Kafka or Redis is told or tells something that SQLite and a mock may not."""


class Dispatchers:
    """One dispatcher at a time, that obeys orders, beside a worker and a holder."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.orders = Orders(service.folder / "orders")
        self._dispatcher: Process | None = None

    def one(self) -> Process:
        """The dispatcher, a new one if the last is gone."""
        if self._dispatcher is None or not self._dispatcher.alive:
            self._dispatcher = self.service.dispatcher(env=self.orders.env)
        return self._dispatcher


@pytest.fixture(scope="module")
def dispatchers(module_stack: Stack) -> Dispatchers:
    service = module_stack.service(
        resend_min_s=1.0,
        publish_deadline_s=PUBLISH_DEADLINE_S,
        kafka_session_timeout_ms=SESSION_MS,
        kafka_publish_deadline_ms=PUBLISH_MS,
    )
    service.broker["task_send_sent_event"] = True
    module_stack.holder(kafka_session_timeout_ms=SESSION_MS)
    service.worker()
    dispatchers = Dispatchers(service)
    dispatchers.one()
    rig.check(service, work(service, "first"), limit=LIMIT)
    return dispatchers


@rig.on_embedded(CRASHED)
def test_a_dispatcher_killed_at(point: str, dispatchers: Dispatchers) -> None:
    """Cases B2 and B11: another goes on from the rows: all operations end, and none runs more often than it should."""
    case, service = CASES[point.rpartition(".")[0]], dispatchers.service
    dispatcher = dispatchers.one()
    if case.starting:
        dispatcher.kill()
        expected = case.load(service, f"at-{point}")
        dispatchers.orders.give(point, *case.also)
        dispatcher = dispatchers.one()
    else:
        dispatchers.orders.give(point, *case.also)
        expected = case.load(service, f"at-{point}")
    rig.dies(dispatcher, dispatchers.orders, point)
    dispatchers.one()
    rig.check(service, expected, limit=case.limit)
    case.after(service)


@rig.on_real(CRASHED, ALSO_REAL)
def test_a_dispatcher_on_real_services_killed_at(point: str, dispatchers: Dispatchers) -> None:
    """The same at places where PostgreSQL, Apache Kafka or Redis may do what their stand-ins do not."""
    test_a_dispatcher_killed_at(point, dispatchers)
