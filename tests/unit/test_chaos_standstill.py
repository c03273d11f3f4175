"""What stands still after a chaos run is found and told, and what only is slow is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from tests.chaos.checker import Verdict
from tests.chaos.run import Outcome
from tests.chaos.standstill import OPERATIONS, Standstill
from tests.chaos.summary import show

QUIET = {"outbox of a": 0, "outbox of the holder": 0}


def test_what_never_moves_is_found() -> None:
    standstill = Standstill()
    left = {"outbox of a": 1, "outbox of the holder": 3}
    assert not standstill.look(["x", "y"], left)
    assert not standstill.look(["x", "y"], {**left, "outbox of the holder": 2})
    assert standstill.still == (OPERATIONS, "outbox of a", "outbox of the holder")


def test_an_outbox_that_never_empties_is_found_though_all_operations_have_ended() -> None:
    standstill = Standstill()
    assert not standstill.look([], {**QUIET, "outbox of the holder": 1})
    assert not standstill.look([], {**QUIET, "outbox of the holder": 1})
    assert standstill.still == ("outbox of the holder",)


def test_what_moves_is_slow_and_not_stuck() -> None:
    """One operation that ends is progress, and so is an outbox that was empty once, whatever comes into it then."""
    standstill = Standstill()
    assert not standstill.look(["x", "y"], {**QUIET, "outbox of a": 5})
    assert not standstill.look(["y"], {**QUIET, "outbox of a": 1})
    assert standstill.look(["y", "z"], QUIET)
    assert standstill.look(["y", "z"], {**QUIET, "outbox of a": 1})
    assert not standstill.still


def test_an_operation_that_comes_beside_those_that_wait_is_no_progress() -> None:
    standstill = Standstill()
    standstill.look(["x"], QUIET)
    assert not standstill.look(["x", "next step"], QUIET)
    assert standstill.still == (OPERATIONS,)


@pytest.fixture
def outcome() -> Outcome:
    """A run without a violation."""
    verdict = Verdict()
    verdict.looked.update(("bound", "group bound", "quiescence", "operations", "results", "states", "once"))
    return Outcome(
        seed=1,
        broker="redis",
        protocol="classic",
        planned=(),
        seconds=1,
        rested=True,
        unfinished=(),
        stuck=(),
        rest_s=1,
        operations=1,
        verdict=verdict,
        figures={},
        mistakes=(),
    )


def test_what_does_not_end_is_in_the_summary_and_such_a_run_is_not_good(outcome: Outcome) -> None:
    console = Console(record=True, width=140)
    assert outcome.good
    late = replace(outcome, rested=False, unfinished=("a-17",), stuck=("outbox of a",))
    show(console, late)
    shown = console.export_text()
    assert "UNFINISHED a-17" in shown
    assert "outbox of a" in shown
    assert not late.good
