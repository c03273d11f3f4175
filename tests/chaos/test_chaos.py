"""A short chaos run on each Celery broker. ``make chaos`` makes longer ones, of other seeds."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tests.chaos.faults import BROKERS, COMMON, Broker
from tests.chaos.run import REST_DEADLINE_S, run
from tests.chaos.summary import show
from tests.conftest import unavailable
from tests.services import ServiceUnavailable

UNFINISHED = ("lost", "rest", "unfinished")
"""What a run also looks like that had no time to come to rest."""

pytestmark = [pytest.mark.processes, pytest.mark.postgresql, pytest.mark.kafka, pytest.mark.timeout(1_200)]


@pytest.fixture
def alone(services_folder: Path) -> Iterator[None]:
    """One run at a time: two at once would test the machine."""
    services_folder.mkdir(parents=True, exist_ok=True)
    with (services_folder / "chaos.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("broker", "seed", "seconds"),
    [pytest.param("redis", 1, 75, marks=pytest.mark.redis), ("rabbitmq", 2, 25)],
)
def test_nothing_is_lost_doubled_or_above_a_limit(tmp_path: Path, broker: Broker, seed: int, seconds: float) -> None:
    """Cases A14, A16 to A18, B2, B5, B9, B11, C1 to C5 and G3 at once, as a seed mixes them."""
    console = Console(width=140, highlight=False)
    try:
        outcome = run(
            tmp_path, seed=seed, seconds=seconds, broker=broker, say=lambda text: console.print(text, markup=False)
        )
    except ServiceUnavailable as error:
        unavailable(error)
        raise
    show(console, outcome)
    found = outcome.verdict.violations
    broken = [one for one in found if outcome.rested or one.kind not in UNFINISHED]
    assert not broken, f"{outcome.command}: {broken[0]}"
    first = found[0] if found else "all of it had moved a minute later"
    # Not to be tried again: the words of a missed deadline are not in it.
    assert not outcome.stuck, f"{outcome.command}: {outcome.stuck} do not move: {first}"
    assert outcome.rested, f"{outcome.command}: rest not within {REST_DEADLINE_S:g} s: {first}"
    assert not outcome.mistakes, outcome.mistakes[0]
    assert not outcome.verdict.blind()
    assert set(outcome.figures) >= set(BROKERS[broker])
    if seconds > 60:
        assert set(outcome.figures) == {*COMMON, *BROKERS[broker]}
        assert outcome.verdict.looked["again"], "no fault made anything run again: nothing was to be explained"
