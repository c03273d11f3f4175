"""What a million waiting operations cost the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psycopg

import celery_durable
from benchmarks.report.figures import percentile
from benchmarks.report.record import Figures
from benchmarks.scenario import Bench, Contender, Contenders, Scenario
from benchmarks.setting.running import WARM_UP, end_to_end
from benchmarks.systems import durable
from benchmarks.waiting import WARM_UP as PASSES_WARM_UP
from benchmarks.waiting import Service, fill
from celery_durable.runtime import runtime_of
from celery_durable.store.accounts import wake
from tests.e2e.observe import rows
from tests.harness import wait_until

MANY, FEW, CALLS, PASSES = 1_000_000, 100, 3_000, 300
FULL = "full"


def hold_back(running: durable.Durable, number: int) -> None:
    """So many operations wait in an account that is paused, and the holder knows it."""
    service = running.services[0]
    runtime = runtime_of(service.app)
    celery_durable.pause(FULL, app=service.app)
    with psycopg.connect(service.database_url.replace("+psycopg", ""), autocommit=True) as connection:
        fill(connection, runtime.tables.operations.name, FULL, number)
    with runtime.database.transaction("benchmark.wake") as connection:
        wake(connection, runtime.tables, [FULL])
    wait_until(lambda: rows(service, "accounts", "account", account=FULL), 60, what="a pass of the full account")
    wait_until(lambda: not rows(service, "outbox", "no"), 60, what="nothing is left to be sent")


@contextlib.contextmanager
def _throughput(bench: Bench) -> Iterator[Contenders]:
    count, many = bench.count(CALLS), bench.count(MANY)
    with contextlib.ExitStack() as handles:
        systems = [
            handles.enter_context(durable.running(bench.servers, task="bench.limit5", accounts=20)) for _ in range(2)
        ]
        hold_back(systems[1], many)

        def measure(number: int) -> Figures:
            return end_to_end(systems[number], count, WARM_UP)

        yield {
            "none waiting": Contender(lambda: measure(0), durable.SETTINGS),
            f"{MANY:,} waiting": Contender(
                lambda: measure(1), "in one account that is paused; both systems stay up over all repetitions"
            ),
        }


@contextlib.contextmanager
def _pass(bench: Bench) -> Iterator[Contenders]:
    turns = bench.count(PASSES, least=50)
    with contextlib.ExitStack() as handles:

        def contender(number: int) -> Contender:
            service = Service(handles.enter_context(bench.servers.new_database()))
            handles.callback(service.database.dispose)
            service.prepare(number)

            def measure() -> Figures:
                own, other = service.measure(turns + PASSES_WARM_UP)
                return {
                    "p50_ms": percentile(own, 0.5),
                    "p99_ms": percentile(own, 0.99),
                    "unrelated_p50_ms": percentile(other, 0.5),
                    "unrelated_p99_ms": percentile(other, 0.99),
                }

            return Contender(measure, f"{number:,} operations of one account wait")

        yield {f"{FEW} waiting": contender(FEW), f"{MANY:,} waiting": contender(bench.count(MANY))}


SCENARIOS = (
    Scenario(
        "backlog",
        "20 accounts in turn, limit 5 each, end to end as in accounts-limit-5, beside a million operations waiting in "
        "an account of their own, and beside none.",
        _throughput,
    ),
    Scenario(
        "pass",
        "The pass that follows a settle in an account where so many wait, in one process on PostgreSQL; "
        "`unrelated`: the one that brings the first report of another account.",
        _pass,
    ),
)
