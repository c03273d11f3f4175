"""A worker's process kills itself at each of its crash points: a pool's child, or the main process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from celery_durable.crashpoints import POINTS
from celery_durable.results import DurableAsyncResult
from celery_durable.store.schema import CANCELLED, FAILED
from tests.crashing import rig
from tests.crashing.orders import Orders
from tests.crashing.rig import Expected
from tests.e2e.observe import History, rows
from tests.harness import Process, Service, Stack, wait_until

pytestmark = pytest.mark.processes

LIMIT = 2
CONCURRENCY = 2


def work(service: Service, account: str) -> Expected:
    return Expected.of(*(service.task("work").delay(account) for _ in range(4)))


def long_work(service: Service, account: str) -> Expected:
    """Longer than a heartbeat's interval."""
    return Expected.of(*(service.task("work").delay(account, 1.0) for _ in range(2)))


def failing(service: Service, account: str) -> Expected:
    return Expected.of(service.task("fail").delay(account), state=FAILED)


def retried(service: Service, account: str) -> Expected:
    return Expected.of(service.task("flaky").delay(account, 1), runs=2)


def requeued(service: Service, account: str) -> Expected:
    return Expected.of(service.task("requeued").delay(account, str(service.folder / account)), runs=2)


def cancelled(service: Service, account: str) -> Expected:
    """While its body runs; the heartbeat tells it."""
    result = started(service, account)
    result.cancel()
    return Expected.of(result, state=CANCELLED)


def terminated(service: Service, account: str) -> Expected:
    """While its body runs; the main process kills its child."""
    result = started(service, account)
    result.revoke(terminate=True)
    return Expected.of(result, state=CANCELLED)


def suicide(service: Service, account: str) -> Expected:
    """Kills its child each time, and fails after the second."""
    return Expected.of(service.task("suicide").delay(account), state=FAILED, runs=2)


def started(service: Service, account: str) -> DurableAsyncResult[int]:
    """A call whose body runs, and would run for ever."""
    result: DurableAsyncResult[int] = service.task("until").delay(account, str(service.folder / "never"))
    wait_until(lambda: History([service]).starts()[result.id], 60, what="its body")
    return result


@dataclass(frozen=True)
class Case:
    """What passes a place, and how many runs that tears if a child dies before or after it.

    :param main: the main process dies there, and its children with it.
    :param torn: how many runs at most these tear.
    :param told: it matters whether the app's own result backend is told: it is, sooner or later.
    """

    load: Callable[[Service, str], Expected]
    before: int = 0
    after: int = 0
    main: bool = False
    torn: int = 0
    told: bool = False
    limit: int | None = LIMIT


CASES = {
    "worker.start": Case(work),
    "worker.beat": Case(long_work, before=1, after=1),
    "worker.succeed": Case(work, before=1),
    "worker.fail": Case(failing, before=1, limit=None),
    "worker.retry": Case(retried, before=1, limit=1),
    "worker.repeat": Case(requeued),
    "worker.cancel": Case(cancelled),
    "worker.revoke": Case(terminated, main=True),
    "worker.lose": Case(suicide, main=True, limit=1),
    "worker.message": Case(work, main=True, torn=CONCURRENCY),
    "worker.outcome": Case(work, told=True),
    "worker.told": Case(failing, limit=None, told=True),
}
CRASHED = [point for point in POINTS if point.rpartition(".")[0] in CASES]
ALSO_REAL = ("worker.start", "worker.beat", "worker.succeed", "worker.message")
"""Places where PostgreSQL or Redis is told what SQLite or a folder may take otherwise."""


class Workers:
    """One worker at a time, that obeys orders."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.orders = Orders(service.folder / "orders")
        self._worker: Process | None = None

    def one(self, *, new: bool = False) -> Process:
        """The worker, a new one if the last is gone."""
        if new and self._worker is not None:
            self._worker.kill()
        if self._worker is None or not self._worker.alive:
            self._worker = self.service.worker(concurrency=CONCURRENCY, env=self.orders.env)
        return self._worker


@pytest.fixture(scope="module")
def workers(module_stack: Stack) -> Workers:
    service = module_stack.service(heartbeat_interval_s=0.3, resend_min_s=1.0)
    service.broker["worker_lost_wait"] = 0.2  # seconds until the main process takes a child's task for lost; 10 else
    service.broker["result_backend"] = f"file://{service.folder / 'results'}"
    (service.folder / "results").mkdir()
    module_stack.holder()
    service.dispatcher()
    return Workers(service)


@rig.on_embedded(CRASHED)
def test_a_worker_killed_at(point: str, workers: Workers) -> None:
    """Every operation ends as it should, its body torn only where it had begun and was not settled."""
    place, _, moment = point.rpartition(".")
    case, service = CASES[place], workers.service
    # The main process may be at what a child of the test before has left, and pass some of these points by that.
    worker = workers.one(new=case.main or case.told)
    workers.orders.give(point)
    expected = case.load(service, f"at-{point}")
    if case.main:
        rig.dies(worker, workers.orders, point)
        workers.one()
    else:
        rig.child_dies(worker, workers.orders, point)
    extra = case.before if moment.startswith("before") else case.after
    rig.check(service, expected, limit=case.limit, extra=range(extra, extra + case.torn + 1))
    if case.told:
        results = [service.folder / "results" / f"celery-task-meta-{operation_id}" for operation_id in expected.ids]
        wait_until(lambda: all(result.exists() for result in results), rig.DEADLINE_S, what="the result backend told")
        wait_until(lambda: not rows(service, "untold", "operation_id"), rig.DEADLINE_S, what="nothing left to tell")


@rig.on_real(CRASHED, ALSO_REAL)
def test_a_worker_on_real_services_killed_at(point: str, workers: Workers) -> None:
    """The same at places where PostgreSQL or Redis may do what their stand-ins do not."""
    test_a_worker_killed_at(point, workers)
