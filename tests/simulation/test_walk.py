"""The random walk, a few seeds by default: ``WALK_SEEDS`` (and ``WALK_FIRST``) in the environment for more."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.invariants import Invariants, InvariantViolation
from tests.simulation import walk
from tests.simulation.mutations import answer_in_an_older_version, broken

SEEDS = int(os.environ.get("WALK_SEEDS", "25"))
FIRST = int(os.environ.get("WALK_FIRST", "0"))

FOUND_BY_SEED = {
    "count only the newest reply": 10,
    "ignore keeps": 60,
    "skip the wait for the new epoch": 40,
}
"""Within how many seeds the walk finds each. Directed schedules find the others: freeing on silence (A14) and keeping a
dead client's demand (A32)."""


def test_the_walk():
    """Loss, doubles, delays, lost topics and databases, dead and silent clients, limits, pauses, cancels (A14 to A21).

    The bound and the footprint hold at every instant; once faults stop, all runs and no row is left.
    """
    looked: Counter[str] = Counter()
    stats: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + SEEDS):
        run = walk.run(seed)
        looked.update(run.invariants.looked)
        stats.update(run.stats)
    together = Invariants(looked)
    together.require(
        "bound", "group bound", "level", "covers", "seq", "ack", "version", "reply", "all ran", "quiescence", "rows"
    )
    if SEEDS >= 25:
        together.require("starves")
        assert all(stats[fault] for fault in ("lost", "databases lost", "topics lost", "killed", "cut off")), stats


@pytest.mark.parametrize("seed", [0, 12])
def test_a_seed_always_gives_the_same_log(seed):
    """Virtual time and one random number generator decide everything."""
    assert walk.Walk(seed).run() == walk.Walk(seed).run()


def test_the_walk_finds_replies_that_go_back():
    """A holder's replies to a client only grow: one in a version below the last is found at once."""
    with answer_in_an_older_version(), pytest.raises(InvariantViolation, match="reply: reply of"):
        walk.run(0)


@pytest.mark.parametrize("mutation", FOUND_BY_SEED)
def test_the_walk_finds_a_seeded_violation(mutation):
    """Each rule of the protocol is needed: without it a seed goes red, and says how to replay it."""

    def run_all() -> None:
        for seed in range(FOUND_BY_SEED[mutation]):
            walk.run(seed)

    with broken(mutation), pytest.raises(InvariantViolation, match="replay: python -m"):
        run_all()
