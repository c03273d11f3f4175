"""One chaos run from its first process to its verdict."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos import history
from tests.chaos.checker import Verdict, check
from tests.chaos.driver import Driver
from tests.chaos.faults import Broker, PlannedFault, draw
from tests.chaos.figures import Recovery, recoveries
from tests.chaos.rest import at_rest, final, outboxes, unfinished
from tests.chaos.standstill import Standstill
from tests.chaos.system import HEARTBEAT_TIMEOUT_S, System

PROTOCOLS = ("classic", "consumer")
MISTAKES = re.compile(
    r"\b(AssertionError|AttributeError|IndexError|KeyError|NameError|NotImplementedError|RecursionError|TypeError"
    r"|UnboundLocalError)\b"
)
"""Errors of a program and not of its surroundings."""
REST_DEADLINE_S = 150.0
"""After the last fault everything must have ended, and all messages been sent, within this."""
STUCK_S = 60.0
"""If no operation ends, or an outbox is never empty, for so long after that, it is no slow machine."""


@dataclass(frozen=True)
class Outcome:
    """What a run showed."""

    seed: int
    broker: Broker
    protocol: str
    planned: Sequence[PlannedFault]
    seconds: float
    rested: bool
    """Whether it came to rest in time."""
    unfinished: Sequence[str]
    """Operations that had not ended :data:`REST_DEADLINE_S` after the last fault."""
    stuck: Sequence[str]
    """What did not move at all for :data:`STUCK_S` after that: see :class:`tests.chaos.standstill.Standstill`."""
    rest_s: float
    operations: int
    verdict: Verdict
    figures: Mapping[str, Recovery]
    mistakes: Sequence[str]
    """Lines of the processes' logs that no outside fault explains: see :data:`MISTAKES`."""

    @property
    def good(self) -> bool:
        """Nothing was violated, it came to rest in time, and every check looked at something."""
        return self.rested and not (self.verdict.violations or self.verdict.blind() or self.mistakes)

    @property
    def command(self) -> str:
        """What makes the same faults and the same load again."""
        return (
            f"make chaos SEED={self.seed} MINUTES={self.seconds / 60:g} BROKER={self.broker} PROTOCOL={self.protocol}"
        )


def run(
    folder: Path,
    *,
    seed: int,
    seconds: float,
    broker: Broker,
    protocol: str | None = None,
    say: Callable[[str], None] = lambda _text: None,
) -> Outcome:
    """Starts everything in ``folder``, makes the faults of the seed for ``seconds``, waits for rest and judges.

    :param protocol: the Kafka group protocol; None: by the seed.
    :raises ServiceUnavailable: a server that it needs cannot be run here.
    """
    protocol = PROTOCOLS[seed % len(PROTOCOLS)] if protocol is None else protocol
    planned = draw(seed, seconds, broker)
    with System(folder, broker, protocol) as system:
        driver = Driver(system, planned, seed, say=say)
        driver.run()
        faults_over_s = time.monotonic()
        rested = driver.settle(lambda: at_rest(system), REST_DEADLINE_S)
        rest_s = time.monotonic() - faults_over_s
        say(f"{'came' if rested else 'did NOT come'} to rest in {rest_s:.1f} s")
        left = [] if rested else unfinished(system)
        standstill = Standstill()
        if not rested:
            driver.settle(lambda: standstill.look(unfinished(system), outboxes(system)), STUCK_S)
        history.write(system.history, final(system))
    events = history.read(system.history)
    verdict = check(events, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S)
    return Outcome(
        seed=seed,
        broker=broker,
        protocol=protocol,
        planned=planned,
        seconds=seconds,
        rested=rested,
        unfinished=left,
        stuck=standstill.still,
        rest_s=rest_s,
        operations=verdict.looked["operations"],
        verdict=verdict,
        figures=recoveries(events, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S),
        mistakes=mistakes(folder),
    )


def mistakes(folder: Path) -> list[str]:
    """Each line of a log below the folder that names an error of a program, with the name of the process."""
    return [
        f"{log.stem}: {line}"
        for log in sorted(folder.rglob("*.log"))
        for line in log.read_text(errors="replace").splitlines()
        if MISTAKES.search(line)
    ]
