"""From the call to the recorded success."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from benchmarks.report.goals import NO_RESULTS, OURS, REDIS_RESULTS
from benchmarks.report.record import Figures
from benchmarks.scenario import Bench, Contender, Contenders, Scenario
from benchmarks.setting.running import CALLERS, WARM_UP, Running, end_to_end
from benchmarks.systems import celery_plain, dbos_queue, durable, procrastinate_jobs

CALLS, ACCOUNTS = 3_000, 20
WHAT = (
    f"Workers up, warm and waiting; {CALLERS} processes call in a loop, one call at a time each, from one moment on; "
    "calls a second from then to the last success that the system itself has recorded (`sent_rate`: to the last call). "
    "`cpu_us_per_call`: CPU time of all processes together, servers included, in µs a call."
)


def _contender(
    bench: Bench, system: Callable[[], AbstractContextManager[Running]], settings: str, calls: int = CALLS
) -> Contender:
    def measure() -> Figures:
        with system() as running:
            return end_to_end(running, bench.count(calls), min(WARM_UP, bench.count(calls)))

    return Contender(measure, settings)


@contextlib.contextmanager
def _no_account(bench: Bench) -> Iterator[Contenders]:
    servers = bench.servers
    yield {
        OURS: _contender(bench, lambda: durable.running(servers, task="bench.noop", callers=CALLERS), durable.SETTINGS),
        NO_RESULTS: _contender(bench, lambda: celery_plain.running(servers, results=False), celery_plain.SETTINGS),
        REDIS_RESULTS: _contender(bench, lambda: celery_plain.running(servers, results=True), celery_plain.SETTINGS),
        "Celery, Redis results, acks_late": _contender(
            bench, lambda: celery_plain.running(servers, results=True, acks_late=True), celery_plain.SETTINGS
        ),
        "DBOS": _contender(
            bench,
            lambda: dbos_queue.running(servers, queue=dbos_queue.UNLIMITED),
            dbos_queue.describe(dbos_queue.UNLIMITED),
        ),
        "Procrastinate": _contender(bench, lambda: procrastinate_jobs.running(servers), procrastinate_jobs.SETTINGS),
    }


@contextlib.contextmanager
def _limit_5(bench: Bench) -> Iterator[Contenders]:
    servers = bench.servers
    limited = dbos_queue.limited(5)
    yield {
        OURS: _contender(
            bench,
            lambda: durable.running(servers, task="bench.limit5", accounts=ACCOUNTS, callers=CALLERS),
            durable.SETTINGS,
        ),
        "no account": _contender(
            bench,
            lambda: durable.running(servers, task="bench.noop", callers=CALLERS),
            "celery-durable without an account",
        ),
        "DBOS": _contender(
            bench,
            lambda: dbos_queue.running(servers, queue=limited, accounts=ACCOUNTS),
            dbos_queue.describe(limited),
            calls=CALLS // 2,
        ),
    }


@contextlib.contextmanager
def _limit_1(bench: Bench) -> Iterator[Contenders]:
    servers = bench.servers
    calls = CALLS // 2
    yield {
        OURS: _contender(
            bench,
            lambda: durable.running(
                servers, task="bench.limit1", accounts=ACCOUNTS, services=2, concurrency=1, callers=CALLERS // 2
            ),
            f"two services with a worker process and {CALLERS // 2} callers each; otherwise as end-to-end",
            calls=calls,
        ),
        "Procrastinate": _contender(
            bench,
            lambda: procrastinate_jobs.running(servers, accounts=ACCOUNTS),
            "each account is a lock; otherwise as end-to-end",
            calls=calls,
        ),
    }


SCENARIOS = (
    Scenario("end-to-end", f"No account. {WHAT}", _no_account, quick=(OURS, REDIS_RESULTS)),
    Scenario("accounts-limit-5", f"20 accounts in turn, limit 5 each. {WHAT}", _limit_5, quick=(OURS, "no account")),
    Scenario(
        "accounts-limit-1",
        "20 accounts in turn, limit 1 each, two services that both want all of them, each with callers of its own. "
        f"{WHAT}",
        _limit_1,
    ),
)
