"""The goals, and how each is judged from a scenario's samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.report.figures import Spread, ratios, spread
from benchmarks.report.record import Measured

OURS = "celery-durable"


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on a figure, or on its ratio to a peer's figure.

    :param peer: None: the bound is on the figure itself.
    :param peer_figure: the peer's figure, if another one.
    """

    scenario: str
    what: str
    figure: str
    kind: Literal["at least", "at most"]
    bound: float
    contender: str = OURS
    peer: str | None = None
    peer_figure: str | None = None
    unit: str = ""

    @property
    def text(self) -> str:
        """The goal in words."""
        if self.peer is None:
            return f"{self.kind} {self.bound:,g} {self.unit}".rstrip()
        return f"{self.kind} {self.bound:g} times {self.peer}"

    def measured(self, measured: Measured) -> Spread | None:
        """The figure or ratio over all repetitions; None if it was not measured."""
        ours = measured.values(self.contender, self.figure)
        if self.peer is None:
            return spread(ours) if ours else None
        theirs = measured.values(self.peer, self.peer_figure or self.figure)
        common = min(len(ours), len(theirs))
        return spread(ratios(ours[:common], theirs[:common])) if common else None

    def reached(self, found: Spread) -> bool:
        """Whether the median keeps the bound."""
        return found.median >= self.bound if self.kind == "at least" else found.median <= self.bound


REDIS_RESULTS = "Celery, Redis results"
NO_RESULTS = "Celery, no results"
ONE_CALL = f"{OURS}, one call a transaction"


def _rate(
    scenario: str,
    what: str,
    bound: float,
    peer: str | None,
    *,
    figure: str = "rate",
    contender: str = OURS,
    peer_figure: str | None = None,
) -> Goal:
    unit = "" if peer else "/s"
    return Goal(
        scenario, what, figure, "at least", bound, peer=peer, contender=contender, peer_figure=peer_figure, unit=unit
    )


def _latency(scenario: str, what: str, p50_ms: float, p99_ms: float, contender: str = OURS) -> list[Goal]:
    return [
        Goal(scenario, f"{what}, p50", "p50_ms", "at most", p50_ms, contender=contender, unit="ms"),
        Goal(scenario, f"{what}, p99", "p99_ms", "at most", p99_ms, contender=contender, unit="ms"),
    ]


GOALS: tuple[Goal, ...] = (
    _rate("enqueue-one", "enqueue one at a time", 1.0, NO_RESULTS),
    _rate("enqueue-in-transaction", "enqueue inside a transaction that is open anyway, 20 calls", 2.0, NO_RESULTS),
    _rate("enqueue-in-transaction", "the same, one call", 2.0, NO_RESULTS, contender=ONE_CALL),
    _rate("enqueue-bulk", "bulk enqueue", 10.0, NO_RESULTS),
    _rate("end-to-end", "end to end without an account", 1.0, REDIS_RESULTS),
    _rate("end-to-end", "end to end without an account", 2.0, "DBOS"),
    _rate("end-to-end", "end to end without an account", 2.0, "Procrastinate"),
    _rate("accounts-limit-5", "end to end, 20 accounts, limit 5", 0.9, "no account"),
    _rate("accounts-limit-5", "end to end, 20 accounts, limit 5", 2.5, "DBOS"),
    _rate("accounts-limit-1", "end to end, 20 accounts, limit 1, two services", 3.0, "Procrastinate"),
    *_latency("release", "release → next waiting starts, through Kafka", 20, 60),
    *_latency("idle-start", "enqueue → start on an idle service, without an account", 10, 30, "no account"),
    *_latency("idle-start", "enqueue → start on an idle service, with a warm lease", 10, 30, "warm lease"),
    _rate("holder", "holder, reports merged and answered per core, in batches", 10_000, None, contender="batches"),
    _rate("holder", "holder, reports merged and answered per core, one a batch", 1_000, None, contender="one a batch"),
    _rate("hungry", "two hungry services, limit 1, 5 ms tasks", 0.8, "one service", contender="two services"),
    _rate("backlog", "throughput with 1,000,000 waiting", 0.9, "none waiting", contender="1,000,000 waiting"),
    Goal(
        "pass", "a pass with 1,000,000 waiting", "p50_ms", "at most", 1.2,
        contender="1,000,000 waiting", peer="100 waiting",
    ),
    Goal(
        "pass", "the first report of an unrelated account with 1,000,000 waiting, p99",
        "unrelated_p99_ms", "at most", 1.5,
        contender="1,000,000 waiting", peer="100 waiting",
    ),
    Goal("memory", "memory of the dispatcher at 100,000 accounts", "dispatcher_mb", "at most", 300, unit="MB"),
    Goal("memory", "memory of the holder at 100,000 accounts", "holder_mb", "at most", 300, unit="MB"),
    _rate("embedded", "embedded (SQLite, mock broker) end to end", 300, None),
)  # fmt: skip
