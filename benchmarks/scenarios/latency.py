"""How long something that could start waits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from benchmarks.report.figures import percentile
from benchmarks.report.goals import NO_RESULTS, OURS
from benchmarks.report.record import Figures
from benchmarks.scenario import Bench, Contender, Contenders, Scenario
from benchmarks.setting.child import call
from benchmarks.systems import celery_plain, durable

CALLS, ROUNDS = 50, 40
KNOWN_S = 0.6
"""After so long the holder knows that the other service waits, and nothing is under way."""
START_S = 30.0


def _figures(delays_ms: Sequence[float]) -> Figures:
    return {"p50_ms": percentile(delays_ms, 0.5), "p99_ms": percentile(delays_ms, 0.99), "calls": float(len(delays_ms))}


@contextlib.contextmanager
def _idle(bench: Bench) -> Iterator[Contenders]:
    count = bench.count(CALLS)

    def ours(account: str) -> Figures:
        with durable.running(bench.servers) as running:
            app = durable.app_of(running.services[0])
            answer = call("benchmarks.systems.durable_send:send_paced", app=app, count=count, account=account)
            running.until(lambda: running.ended() == count + 5, "every call has succeeded")
            return _figures(answer["delays_ms"])

    def plain() -> Figures:
        with celery_plain.running(bench.servers, results=False) as running:
            answer = call("benchmarks.systems.celery_app:send_paced", count=count, **running.settings)
            return _figures(answer["delays_ms"])

    yield {
        "no account": Contender(lambda: ours(""), durable.SETTINGS),
        "warm lease": Contender(lambda: ours("tenant:warm"), "limit 5, the lease kept by the call before"),
        NO_RESULTS: Contender(plain, celery_plain.SETTINGS),
    }


class HandOver:
    """Two services that hand one account's only permit to each other."""

    def __init__(self, running: durable.Durable) -> None:
        self._running = running
        self._tasks = [service.app.tasks["bench.hold"] for service in running.services]
        self._round = 0
        self._seen_ns = [0, 0]

    @property
    def from_number(self) -> int:
        """Which service held the permit first in the present round."""
        return self._round % 2

    def pass_on(self) -> float:
        """One service holds the permit, the other waits; ms from the end of the one's body to the other's start."""
        self._round += 1
        holds, waits = self.from_number, (self._round + 1) % 2
        self._tasks[holds].delay("tenant:one", self._round)
        self._until_started(holds)
        self._tasks[waits].delay("tenant:one", self._round)
        time.sleep(KNOWN_S)
        tallies = self._running.tallies
        tallies[holds].flag = self._round
        self._until_started(waits)
        delay_ms = (tallies[waits].started_ns - tallies[holds].ended_ns) / 1e6
        tallies[waits].flag = self._round
        self._running.until(lambda: self._running.ended() == 2 * self._round, "both have succeeded", START_S)
        return delay_ms

    def _until_started(self, number: int) -> None:
        tally, before_ns = self._running.tallies[number], self._seen_ns[number]
        self._running.until(lambda: tally.started_ns > before_ns, f"service {number} has the permit", START_S)
        self._seen_ns[number] = tally.started_ns


@contextlib.contextmanager
def _release(bench: Bench) -> Iterator[Contenders]:
    def measure() -> Figures:
        with durable.running(bench.servers, services=2, concurrency=1) as running:
            hand_over = HandOver(running)
            for _ in range(3):
                hand_over.pass_on()
            return _figures([hand_over.pass_on() for _ in range(bench.count(ROUNDS, least=5))])

    yield {OURS: Contender(measure, f"two services with a worker process each; {durable.SETTINGS}")}


SCENARIOS = (
    Scenario(
        "release",
        "One account of limit 1. A body of one service runs, a call of the other waits, the holder knows of both, "
        "all else is idle. From the end of the one's body to the start of the other's: settle, report, Kafka, holder, "
        "Kafka, admission, delivery. In turn in both directions.",
        _release,
    ),
    Scenario(
        "idle-start",
        "A call every 0.3 to 0.5 s, at random, of a service that is idle: from the call to the start of its body.",
        _idle,
        quick=("no account", "warm lease"),
    ),
)
