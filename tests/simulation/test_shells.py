"""Seeds of the simulation of the real shells. ``SIM_SEEDS`` (and ``SIM_FIRST``) in the environment for others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.invariants import Invariants
from tests.simulation import profiles
from tests.simulation.checks import ALL_CHECKS
from tests.simulation.mutations import MUTATIONS, broken, finds
from tests.simulation.run import run, simulator

SEEDS = int(os.environ.get("SIM_SEEDS", "25"))
FIRST = int(os.environ.get("SIM_FIRST", "0"))

TRIES = 15
"""How many seeds are tried from the one on where a mutation was found, should the drawing have changed since."""


@pytest.fixture(autouse=True)
def _simulated():
    with simulator():
        yield


def test_seeds():
    """Dispatchers, relays, holders and workers' statements under a seed's faults, then none: what must hold, holds.

    The bound and the footprint hold after every commit; no operation is lost, none settled or started by a stale
    token; numbers only grow; once faults stop all runs, nothing is counted that is not in use, and no row is left.
    """
    looked: Counter[str] = Counter()
    stats: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + SEEDS):
        outcome = run(seed)
        assert not outcome.failure, f"seed {seed}: {outcome.failure}"
        looked.update(outcome.looked)
        stats.update(outcome.stats)
    together = Invariants(looked)
    together.require(*ALL_CHECKS)
    assert stats["died"], stats
    assert any(name.startswith("crash at") for name in stats), stats


def test_a_seed_gives_the_same_log_under_any_hash_seed():
    """One random number generator and virtual time decide everything: no set's order, no string's hash, no clock."""
    command = [sys.executable, "-m", "tests.simulation.run", "--first", "1", "--count", "3", "--jobs", "1", "--digests"]
    root = Path(__file__).parents[2]
    digests = {
        subprocess.run(
            command, cwd=root, env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
    assert len(digests.pop().splitlines()) == 3


@pytest.mark.parametrize("mutation", [name for name in MUTATIONS if name])
def test_the_simulation_finds_a_broken_rule(mutation):
    """Each rule is needed: without it a seed turns exactly the check red that is for it, and says how to replay it."""
    one = MUTATIONS[mutation]
    step = profiles.EVERY if one.profile else 1
    with broken(mutation):
        failures = (run(one.seed + step * number).failure for number in range(TRIES))
        failure = next((failure for failure in failures if finds(mutation, failure)), "")
    assert "make sim SEED=" in failure


def test_every_check_has_a_mutation():
    """No check of the simulation is without a broken rule that it alone, or it first, finds."""
    assert {check for one in MUTATIONS.values() for check in one.turns_red} >= set(ALL_CHECKS)


def test_the_documented_table_has_every_broken_rule():
    """What each turns red stands there, as it is tried here."""
    text = (Path(__file__).parents[2] / "docs" / "guarantees.md").read_text()
    table = text.partition("### Rules broken on purpose")[2].partition("\n### ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    documented = {rule: check for rule, seeds, check in rows if seeds.isdigit()}
    assert set(documented) == {name for name in MUTATIONS if name}
    assert [rule for rule, check in documented.items() if check not in MUTATIONS[rule].turns_red] == []


def test_a_replay_is_a_log_that_a_person_can_follow():
    """One line an event: the time, who, what."""
    lines: list[str] = []
    outcome = run(3, lines=lines)
    assert outcome.digest == run(3).digest, "to be watched must change nothing"
    text = "\n".join(lines)
    assert "AccountReport client_id" in text
    assert "is admitted, attempt 1" in text
    assert all("\n" not in line for line in lines)
