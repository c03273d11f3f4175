"""What a step costs a service's database: the table in docs/performance.md that a test keeps true."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
HEAD = "| step | statements | commits |"

ENQUEUE, DELIVER = "enqueue, with an account", "deliver one that was handed over"
RUN, AFTER = "start and settle, with an account", "the pass after it"
ADMIT, GIVE_BACK = "the pass that admits it, of a warm lease", "the pass that gives a permit back"
REPLY = "the reply that brings the next one"

LEASED = (ENQUEUE, ADMIT, DELIVER, RUN, AFTER)
"""A call with a warm lease, alone in each of its passes."""
COLD = (ENQUEUE, GIVE_BACK, REPLY, DELIVER, RUN, AFTER, GIVE_BACK, REPLY)
"""One without a lease. Not in the table: the pass that only reports, which costs what one does that gives a permit
back, and the reply to that, which costs what one does that admits."""


class Step(NamedTuple):
    """What one step, or several, do."""

    statements: int
    commits: int


def read(page: str) -> dict[str, Step]:
    """The steps of the table.

    :raises ValueError: there is no such table.
    """
    _, found, rest = page.partition(HEAD)
    if not found:
        raise ValueError(f"no table {HEAD}")
    lines = rest.partition("\n\n")[0].splitlines()[2:]
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {name: Step(int(statements), int(commits)) for name, statements, commits, *_ in cells}


def total(steps: Mapping[str, Step], names: Iterable[str]) -> Step:
    """All of these together.

    :raises KeyError: the table has no such step.
    """
    chosen = [steps[name] for name in names]
    return Step(sum(step.statements for step in chosen), sum(step.commits for step in chosen))
