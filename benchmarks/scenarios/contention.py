"""Two services that both always want an account's only permit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from benchmarks.report.record import Figures
from benchmarks.scenario import Bench, Contender, Contenders, Scenario
from benchmarks.setting.running import end_to_end
from benchmarks.systems import durable

CALLS, DURATION_S = 400, 0.005


@contextlib.contextmanager
def _hungry(bench: Bench) -> Iterator[Contenders]:
    count = bench.count(CALLS)

    def measure(services: int) -> Figures:
        with durable.running(
            bench.servers,
            services=services,
            concurrency=1,
            sender="send_work",
            account="tenant:one",
            duration_s=DURATION_S,
        ) as running:
            return end_to_end(running, count, warm_up=20)

    yield {
        "one service": Contender(lambda: measure(1), f"a worker process; {durable.SETTINGS}"),
        "two services": Contender(lambda: measure(2), "a worker process each, half of the calls each"),
    }


SCENARIOS = (
    Scenario(
        "hungry",
        "One account of limit 1 and a backlog of 5 ms bodies, enqueued at once: calls a second until the last success.",
        _hungry,
    ),
)
