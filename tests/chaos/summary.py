"""The summary of a chaos run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tests.chaos.figures import p50
from tests.chaos.plans import FRESH, PLAIN, WARM
from tests.chaos.run import REST_DEADLINE_S, Outcome

VIOLATIONS_SHOWN = 30


def show(console: Console, outcome: Outcome) -> None:
    """Prints one table of faults, and the verdict."""
    verdict = outcome.verdict
    console.print(_faults(outcome))
    facts = {
        "seed, broker, group protocol": f"{outcome.seed}, {outcome.broker}, {outcome.protocol}",
        "operations / runs of bodies": f"{outcome.operations} / {verdict.runs}",
        "most above a limit": verdict.most_above,
        "lost": verdict.count("lost"),
        "run again without a fault that explains it": verdict.count("unexplained") + verdict.count("twice"),
        "run again, by the fault that explains it": _counts(verdict.explained),
        "other violations": len(verdict.violations)
        - sum(verdict.count(kind) for kind in ("bound", "lost", "unexplained", "twice")),
        "errors of a program in the logs": len(outcome.mistakes),
        "at rest after": f"{outcome.rest_s:.1f} s" if outcome.rested else "not within the deadline",
        f"unfinished: not ended {REST_DEADLINE_S:g} s after the last fault": len(outcome.unfinished),
        "stuck: does not move at all": ", ".join(outcome.stuck) or "nothing",
    }
    table = Table(show_header=False, title="Verdict", title_justify="left")
    for name, value in facts.items():
        table.add_row(name, str(value))
    console.print(table)
    for violation in verdict.violations[:VIOLATIONS_SHOWN]:
        console.print(f"VIOLATION {violation}", markup=False, soft_wrap=True)
    for operation in outcome.unfinished[:VIOLATIONS_SHOWN]:
        console.print(f"UNFINISHED {operation}", markup=False)
    for line in outcome.mistakes[:VIOLATIONS_SHOWN]:
        console.print(f"MISTAKE {line}", markup=False, soft_wrap=True)
    if blind := verdict.blind():
        console.print(f"Nothing was shown: these checks never looked at anything: {', '.join(blind)}", markup=False)


def _faults(outcome: Outcome) -> Table:
    table = Table(title="Faults, and seconds from then on: p50 / worst", title_justify="left")
    table.add_column("fault")
    for name in ("times", "run again", "new permit", "lease", "no account"):
        table.add_column(name, justify="right")
    for kind, figures in sorted(outcome.figures.items()):
        lanes = [_seconds(figures.lanes.get(lane, ())) for lane in (FRESH, WARM, PLAIN)]
        table.add_row(kind, str(figures.faults), _seconds(figures.again_s), *lanes)
    table.caption = (
        "run again: an operation whose process was killed or frozen; the others: the longest wait of a probe that was "
        "enqueued between this fault and the next"
    )
    return table


def _seconds(values: Sequence[float]) -> str:
    middle = p50(values)
    return "" if middle is None else f"{middle:.2f} / {max(values):.2f}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"
