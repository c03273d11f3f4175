"""What more of everything costs: accounts, permits, waiting operations, services, holders."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

import psutil

from benchmarks.report.figures import percentile
from benchmarks.report.record import Figures
from benchmarks.scenario import Bench, Contender, Contenders, Scenario
from benchmarks.scenarios.backlog import hold_back
from benchmarks.setting.running import WARM_UP, complete, timed_run
from benchmarks.systems import durable
from benchmarks.systems.reporter import Reporter
from tests.harness import Process

CALLS, CALLS_ACCOUNTS = 1_500, 4_000
"""The second where there are more accounts than calls: what the first of them were given comes back meanwhile."""
STEADY, A_SECOND = 160, 20
"""Calls whose delay is measured, and how many of them come in a second: far fewer than any point can do."""
ACCOUNTS, LIMIT = 20, 5
REPORTED_ACCOUNTS, ROUNDS = 2_000, 5
UNBOUNDED = 1_000_000_000
"""So many accounts that no call meets the account of another."""

Measure = Callable[[Bench, int], Figures]
GROUP = "growth"
REPETITIONS = 1


def _measure(
    bench: Bench,
    *,
    accounts: int = ACCOUNTS,
    limit: int = LIMIT,
    services: int = 1,
    waiting: int = 0,
    pool: str = "prefork",
) -> Figures:
    with durable.running(
        bench.servers, services=services, pool=pool, sender="send_limited", accounts=accounts, limit=limit
    ) as running:
        if waiting:
            hold_back(running, waiting)
        complete(running, WARM_UP)
        delays = _delays(running, bench.count(STEADY), first=WARM_UP)
        calls = CALLS if accounts <= CALLS else CALLS_ACCOUNTS
        return timed_run(running, bench.count(calls)) | delays


def _delays(running: durable.Durable, count: int, first: int) -> Figures:
    """From enqueue to start of calls that come one by one, to the accounts from number ``first`` on."""
    newest = running.newest()
    running.fields |= {"first": first, "interval_s": len(running.services) / A_SECOND}
    complete(running, count)
    running.fields |= {"first": first + count, "interval_s": 0.0}
    delays_ms = running.start_delays_ms(newest)
    return {"p50_ms": percentile(delays_ms, 0.5), "p99_ms": percentile(delays_ms, 0.99)}


def _accounts(bench: Bench, number: int) -> Figures:
    return _measure(bench, accounts=number)


def _limits(bench: Bench, number: int) -> Figures:
    return _measure(bench, accounts=1, limit=number)


def _waiting(bench: Bench, number: int) -> Figures:
    return _measure(bench, waiting=number)


def _services(bench: Bench, number: int) -> Figures:
    return _measure(bench, services=number, limit=4, pool="threads")


def _holders(bench: Bench, number: int) -> Figures:
    """First the delays of calls that each need a permit, then, with the service gone, the reports."""
    with bench.servers.stack() as stack:
        holders = [durable.start_holder(stack) for _ in range(number)]
        service = durable.new_service(stack, "service")
        dispatcher = service.dispatcher()
        worker = durable.start_worker(service, 1, "solo")
        with contextlib.closing(
            durable.Durable([service], [*holders, dispatcher, worker], "send_limited", accounts=UNBOUNDED, limit=LIMIT)
        ) as running:
            complete(running, WARM_UP)
            figures = _delays(running, bench.count(STEADY), first=WARM_UP)
        for process in (worker, dispatcher):
            process.terminate()
        with contextlib.closing(Reporter(stack, holders, bench.count(REPORTED_ACCOUNTS))) as reporter:
            reporter.until_shared()
            reporter.report(1)
            before_s = _cpu_s(holders)
            took_s = reporter.report(ROUNDS)
            reports = ROUNDS * bench.count(REPORTED_ACCOUNTS)
            cpu_us = (_cpu_s(holders) - before_s) / reports * 1e6
            return figures | {"rate": reports / took_s, "holder_cpu_us_per_report": cpu_us}


def _cpu_s(holders: Sequence[Process]) -> float:
    times = [psutil.Process(holder.pid).cpu_times() for holder in holders]
    return sum(one.user + one.system for one in times)


def _contenders(
    measure: Measure, points: Sequence[int], settings: str
) -> Callable[[Bench], AbstractContextManager[Contenders]]:
    @contextlib.contextmanager
    def contenders(bench: Bench) -> Iterator[Contenders]:
        yield {
            f"{point:,}": Contender(
                partial(measure, bench, point), settings if point == points[0] else "", float(point)
            )
            for point in points
        }

    return contenders


def _scenario(axis: str, what: str, measure: Measure, points: Sequence[int], settings: str) -> Scenario:
    return Scenario(f"{GROUP}-{axis}", what, _contenders(measure, points, settings), axis=axis, repetitions=REPETITIONS)


WHAT = (
    f"`p50_ms`, `p99_ms`: from enqueue to start, by the database's clock, of {STEADY} calls, {A_SECOND} a second, on a "
    f"warm system that does nothing else. `rate`: then {CALLS:,} calls as fast as they go, calls a second from the "
    "first call to the last recorded success."
)

SCENARIOS = (
    _scenario(
        "accounts",
        f"One service, limit {LIMIT}, so many accounts in turn. {WHAT} Of 10,000 accounts {CALLS_ACCOUNTS:,} are "
        "called, each once, so that what the first of them were given comes back meanwhile.",
        _accounts,
        (1, 10, 100, 1_000, 10_000),
        durable.SETTINGS,
    ),
    _scenario(
        "limits",
        f"One service, one account with such a limit. {WHAT}",
        _limits,
        (1, 3, 10, 30, 100, 300, 1_000),
        durable.SETTINGS,
    ),
    _scenario(
        "waiting",
        f"One service, {ACCOUNTS} accounts in turn, limit {LIMIT} each, beside so many operations that wait in an "
        f"account of their own, which is paused. {WHAT}",
        _waiting,
        (0, 1_000, 10_000, 100_000, 1_000_000),
        durable.SETTINGS,
    ),
    _scenario(
        "services",
        f"So many services, each with a dispatcher, a worker and a caller, that all want the same {ACCOUNTS} accounts "
        f"in turn, limit 4 each; the calls are shared among them. {WHAT}",
        _services,
        (1, 2, 4, 8),
        f"a worker of one process with 2 threads each (pool threads); otherwise {durable.SETTINGS}",
    ),
    _scenario(
        "holders",
        "So many holder processes on one database and one topic of 12 partitions. `p50_ms`, `p99_ms`: from enqueue to "
        f"start of {STEADY} calls of one service, {A_SECOND} a second, each to an account of its own, so that each "
        f"asks the holder. `rate`: then, without the service, {ROUNDS} reports on each of {REPORTED_ACCOUNTS:,} "
        "accounts that the holders know are written to Kafka at once; reports a second until all are merged and "
        "answered.",
        _holders,
        (1, 2, 4),
        "default settings; a worker of one process (pool solo)",
    ),
)
