"""Memory of the processes that hold what is known of accounts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil
import psycopg

from benchmarks.report.goals import OURS
from benchmarks.report.record import Figures
from benchmarks.scenario import Bench, Contender, Contenders, Scenario
from benchmarks.setting.child import Failed, call
from benchmarks.setting.servers import Servers
from benchmarks.systems import durable
from tests.harness import Process, wait_until

ACCOUNTS = 100_000


def _megabytes(process: Process) -> float:
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    return sum(one.memory_info().rss for one in family) / 1e6


def _measure(servers: Servers, accounts: int) -> Figures:
    with servers.stack() as stack:
        holder = durable.start_holder(stack)
        service = durable.new_service(stack, "billing")
        dispatcher = service.dispatcher()
        call("benchmarks.systems.durable_send:send_many", app=durable.app_of(service), task="bench.limit5",
             count=accounts, accounts=accounts)  # fmt: skip
        with psycopg.connect(service.database_url.replace("+psycopg", ""), autocommit=True) as connection:

            def all_admitted() -> bool:
                for process in (holder, dispatcher):
                    if not process.alive:
                        raise Failed(f"{process.label} ended with {process.returncode}:\n{process.log_tail()}")
                query = "SELECT count(*) FROM durable_operations WHERE state = 'admitted'"
                return connection.execute(query).fetchone() == (accounts,)

            wait_until(all_admitted, 500, what=f"{accounts} accounts have a permit")
        return {"dispatcher_mb": _megabytes(dispatcher), "holder_mb": _megabytes(holder)}


@contextlib.contextmanager
def _contenders(bench: Bench) -> Iterator[Contenders]:
    accounts = bench.count(ACCOUNTS)
    yield {OURS: Contender(lambda: _measure(bench.servers, accounts), f"{durable.SETTINGS}; no worker")}


SCENARIOS = (
    Scenario(
        "memory",
        "One operation in each of 100,000 accounts is enqueued, and admitted after one report and one reply each; no "
        "worker runs them. Resident memory of the processes then.",
        _contenders,
    ),
)
