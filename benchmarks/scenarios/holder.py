"""How many reports a holder merges and answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil

from benchmarks.report.record import Figures
from benchmarks.scenario import Bench, Contender, Contenders, Scenario
from benchmarks.setting.servers import Servers
from benchmarks.systems import durable
from benchmarks.systems.reporter import Reporter

ACCOUNTS_BATCHED, ACCOUNTS_SINGLE, ROUNDS = 2_000, 500, 5


def _measure(servers: Servers, accounts: int, batch_max: int) -> Figures:
    with servers.stack() as stack:
        holder = durable.start_holder(stack, batch_max=batch_max)
        with contextlib.closing(Reporter(stack, [holder], accounts)) as reporter:
            reporter.report(1)
            process = psutil.Process(holder.pid)
            before = process.cpu_times()
            took_s = reporter.report(ROUNDS)
            after = process.cpu_times()
        reports = ROUNDS * accounts
        cpu_s = after.user + after.system - before.user - before.system
        return {"rate": reports / took_s, "rate_by_its_cpu_time": reports / cpu_s}


@contextlib.contextmanager
def _contenders(bench: Bench) -> Iterator[Contenders]:
    batched, single = bench.count(ACCOUNTS_BATCHED), bench.count(ACCOUNTS_SINGLE)
    yield {
        "batches": Contender(lambda: _measure(bench.servers, batched, 500), f"batch_max 500, {batched} accounts"),
        "one a batch": Contender(lambda: _measure(bench.servers, single, 1), f"batch_max 1, {single} accounts"),
    }


SCENARIOS = (
    Scenario(
        "holder",
        "One holder process. Five reports on each of many accounts that it knows, in turn, are written to Kafka at "
        "once; reports a second until the database has their offsets and Kafka every reply. `rate_by_its_cpu_time`: by "
        "the CPU time of the holder's process, without PostgreSQL's and Kafka's.",
        _contenders,
    ),
)
