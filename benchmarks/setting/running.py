"""A system that is up and ready to be sent calls, and the one way in which all of them are timed."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import psutil

from benchmarks.report.record import Figures
from benchmarks.setting.child import Child, Failed, start_together
from benchmarks.setting.tally import Tally
from tests.services import ServerProcess

POLL_S = 0.005
CALLERS = 4
"""Processes that call at once, as a web server's do: one alone waits for its answer most of the time."""
WARM_UP = 200


class Running(ABC):
    """One system with its workers.

    :param tallies: what its bodies count in.
    :param processes: must all go on running.
    """

    DEADLINE_S: ClassVar[float] = 240.0
    """How long anything may take."""

    def __init__(self, tallies: Sequence[Tally], processes: Sequence[ServerProcess]) -> None:
        self.tallies = list(tallies)
        self._processes = list(processes)

    @abstractmethod
    def send(self, count: int) -> list[Child]:
        """Starts to send ``count`` calls in all, one at a time, from one or several processes for each service.

        A child answers ``began_ns`` (after its first call, which opens connections), ``ended_ns``, how many calls it
        ``timed``, and the CPU time that it had spent before (``start_cpu_ns``).
        """

    @abstractmethod
    def ended(self) -> int:
        """How many calls the system itself has recorded as succeeded."""

    @property
    def bodies(self) -> int:
        """Bodies that have run."""
        return sum(tally.count for tally in self.tallies)

    def check(self) -> None:
        """:raises Failed: a process of the system has ended."""
        for process in self._processes:
            if not process.alive:
                raise Failed(f"{' '.join(process.command[-4:])} ended with {process.returncode}:\n{process.log_tail()}")

    def until(self, condition: Callable[[], bool], what: str, deadline_s: float | None = None) -> None:
        """Waits for the condition.

        :raises Failed: it did not come true in time, or a process has ended.
        """
        deadline_s = self.DEADLINE_S if deadline_s is None else deadline_s
        end = time.monotonic() + deadline_s
        while not condition():
            self.check()
            if time.monotonic() > end:
                logs = "\n".join(process.log_tail(15) for process in self._processes)
                raise Failed(
                    f"not within {deadline_s:g} s: {what} ({self.bodies} bodies, {self.ended()} ended)\n{logs}"
                )
            time.sleep(POLL_S)


def shares(count: int, callers: int) -> list[int]:
    """How many calls each caller makes: at least two, or fewer callers call."""
    callers = max(1, min(callers, count // 2))
    share, rest = divmod(count, callers)
    return [share + (number < rest) for number in range(callers)]


def call_together(sender: str, count: int, **fields: Any) -> list[Child]:
    """So many calls from :data:`CALLERS` processes that begin together, each with these fields."""
    return start_together([Child(sender, gated=True, count=share, **fields) for share in shares(count, CALLERS)])


def complete(running: Running, count: int) -> tuple[list[dict[str, int]], int]:
    """Sends ``count`` calls and waits until the system has recorded that all succeeded.

    Returns what the senders answered, and when the last one was recorded, in ns.

    :raises Failed: fewer, or more, bodies ran, or were recorded.
    """
    bodies, ended = running.bodies + count, running.ended() + count
    senders = running.send(count)

    def all_ran() -> bool:
        for sender in senders:
            sender.check()
        return running.bodies >= bodies

    try:
        running.until(all_ran, f"{count} bodies")
        running.until(lambda: running.ended() >= ended, f"{count} succeeded")
        finished_ns = time.monotonic_ns()
    except BaseException:
        for sender in senders:
            sender.kill()
        raise
    answers = [sender.result() for sender in senders]
    if (running.bodies, running.ended()) != (bodies, ended):
        raise Failed(f"{running.bodies} bodies and {running.ended()} ended, where {bodies} and {ended} are right")
    return answers, finished_ns


def cpu_s() -> float:
    """CPU time of every process that this one started, servers and those that have ended included."""
    own = os.times()
    living = psutil.Process().children(recursive=True)
    return own.children_user + own.children_system + sum(sum(process.cpu_times()[:4]) for process in living)


def end_to_end(running: Running, count: int, warm_up: int = WARM_UP) -> Figures:
    """Calls a second from the first call to the last recorded success, the workers warm and waiting."""
    complete(running, warm_up)
    return timed_run(running, count)


def timed_run(running: Running, count: int) -> Figures:
    """What :func:`end_to_end` measures, of a system that is warm."""
    before_s = cpu_s()
    answers, finished_ns = complete(running, count)
    spent_s = cpu_s() - before_s - sum(answer["start_cpu_ns"] for answer in answers) / 1e9
    timed = sum(answer["timed"] for answer in answers)
    began_ns = min(answer["began_ns"] for answer in answers)
    sent_ns = max(answer["ended_ns"] for answer in answers)
    return {
        "rate": timed / (finished_ns - began_ns) * 1e9,
        "sent_rate": timed / (sent_ns - began_ns) * 1e9,
        "cpu_us_per_call": spent_s / timed * 1e6,
    }
