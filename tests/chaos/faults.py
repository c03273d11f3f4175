"""Which faults a run makes, when and to whom: drawn from a seed. Pure; :mod:`tests.chaos.driver` makes them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Broker = Literal["redis", "rabbitmq"]

PREFORK_WORKERS = ("a-prefork", "b-prefork", "b-second")
WORKERS = (*PREFORK_WORKERS, "a-threads")
DISPATCHERS = ("a-dispatcher", "a-second-dispatcher", "b-dispatcher")
HOLDERS = ("holder", "second-holder")


@dataclass(frozen=True)
class Kind:
    """A kind of fault: its possible targets, and the bounds of how long it lasts, in seconds."""

    targets: Sequence[str]
    lasts_s: tuple[float, float]
    weight: int = 1
    """How often it is in a deck."""


COMMON: Mapping[str, Kind] = {
    "worker-kill": Kind(WORKERS, (0.2, 4), 2),
    "worker-main-kill": Kind(PREFORK_WORKERS, (0.2, 4)),
    "worker-child-kill": Kind(PREFORK_WORKERS, (0, 0)),
    "worker-freeze": Kind(WORKERS, (1, 12), 2),
    "worker-child-freeze": Kind(PREFORK_WORKERS, (1, 12)),
    "dispatcher-kill": Kind(DISPATCHERS, (0.2, 6), 2),
    "dispatcher-freeze": Kind(DISPATCHERS, (1, 10)),
    "holder-kill": Kind(HOLDERS, (0.2, 8), 2),
    "both-holders-kill": Kind(("both holders",), (0.2, 4)),
    "holder-freeze": Kind(HOLDERS, (1, 12), 2),
    "holder-database-lost": Kind(("holder's database",), (0, 0)),
    "kafka-kill": Kind(("Kafka",), (0.2, 8)),
    "postgresql-restart": Kind(("PostgreSQL",), (0, 2)),
}
BROKERS: Mapping[Broker, Mapping[str, Kind]] = {
    "redis": {"redis-flush": Kind(("Redis",), (0, 0)), "redis-kill": Kind(("Redis",), (0.2, 3))},
    "rabbitmq": {"rabbitmq-purge": Kind(("RabbitMQ",), (0, 0)), "rabbitmq-kill": Kind(("RabbitMQ",), (0.2, 3))},
}


@dataclass(frozen=True)
class PlannedFault:
    """One fault, ``at_s`` after the start of a run."""

    at_s: float
    kind: str
    target: str
    lasts_s: float


def draw(seed: int, seconds: float, broker: Broker, *, every_s: float = 4.0) -> list[PlannedFault]:
    """The faults of a run of ``seconds``, in any order: first one of each kind, the broker's own early, then by weight.

    A longer run of the same seed begins like a shorter one.
    """
    rng = random.Random(f"faults {seed}")
    kinds = {**COMMON, **BROKERS[broker]}
    planned: list[PlannedFault] = []
    at_s = rng.uniform(1, 3)
    for kind in _order(rng, broker):
        if at_s >= seconds:
            break
        target = rng.choice(kinds[kind].targets)
        planned.append(PlannedFault(round(at_s, 2), kind, target, round(rng.uniform(*kinds[kind].lasts_s), 2)))
        at_s += rng.uniform(0.25, 1.75) * every_s
    return planned


def _order(rng: random.Random, broker: Broker) -> Iterator[str]:
    first = list(COMMON)
    rng.shuffle(first)
    for place, kind in enumerate(BROKERS[broker]):
        first.insert(1 + 2 * place, kind)
    yield from first
    while True:
        deck = [name for name, kind in {**COMMON, **BROKERS[broker]}.items() for _ in range(kind.weight)]
        rng.shuffle(deck)
        yield from deck
