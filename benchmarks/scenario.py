"""What a scenario is: contenders that are measured in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.report.record import Figures
from benchmarks.setting.servers import Servers


@dataclass(frozen=True, slots=True)
class Bench:
    """What a scenario measures with.

    :param scale: of every number of calls; 1 for a run that is stored.
    """

    servers: Servers
    scale: float = 1.0

    def count(self, full: int, least: int = 20) -> int:
        """So many calls, on this scale."""
        return max(least, round(full * self.scale))


@dataclass(frozen=True, slots=True)
class Contender:
    """One that is measured.

    :param settings: what is to be known about its set-up.
    :param at: where it stands on the axis of a scenario that has one.
    """

    measure: Callable[[], Figures]
    settings: str = ""
    at: float | None = None


Contenders = dict[str, Contender]
"""By name, as goals and tables call them."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario.

    :param what: what exactly is measured, in a sentence or two.
    :param contenders: sets up what its contenders share, until the context ends.
    :param quick: the contenders that the quick comparison measures; none: it leaves the scenario out.
    :param axis: what grows from one contender to the next; none: they are compared with each other.
    :param repetitions: how many a stored run has at least.
    """

    name: str
    what: str
    contenders: Callable[[Bench], contextlib.AbstractContextManager[Contenders]]
    quick: tuple[str, ...] = ()
    axis: str = ""
    repetitions: int = 3
