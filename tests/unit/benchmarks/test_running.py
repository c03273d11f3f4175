"""A measurement that did not do all of its work, or too much of it, fails."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from benchmarks.setting.child import Child, Failed, call, start_together
from benchmarks.setting.running import Running, complete, end_to_end, shares
from benchmarks.setting.tally import Tally


class Sender:
    """A child that has sent its calls at once."""

    def __init__(self, count: int) -> None:
        self.answer = {"began_ns": 0, "ended_ns": 1, "timed": count - 1, "start_cpu_ns": 0}
        self.killed = False

    def check(self) -> None:
        """It is well."""

    def result(self) -> dict[str, int]:
        return self.answer

    def kill(self) -> None:
        self.killed = True


class System(Running):
    """Runs every call at once; so many bodies and records more than are right."""

    def __init__(self, folder: Path, *, bodies: int = 0, recorded: int = 0) -> None:
        super().__init__([Tally(folder / "tally")], [])
        self._more_bodies, self._more_recorded = bodies, recorded
        self._recorded = 0
        self.senders: list[Sender] = []

    def send(self, count: int) -> list[Child]:
        for _ in range(count + self._more_bodies):
            self.tallies[0].ran()
        self._recorded += count + self._more_recorded
        self.senders.append(Sender(count))
        return [cast(Child, self.senders[-1])]

    def ended(self) -> int:
        return self._recorded


def test_all_of_the_work_is_a_measurement(tmp_path: Path) -> None:
    system = System(tmp_path)
    figures = end_to_end(system, 50, warm_up=10)
    assert system.bodies == system.ended() == 60
    assert set(figures) == {"rate", "sent_rate", "cpu_us_per_call"}
    assert figures["sent_rate"] == 49e9


@pytest.mark.parametrize(("bodies", "recorded"), [(1, 0), (0, 1)])
def test_too_much_of_it_is_none(tmp_path: Path, bodies: int, recorded: int) -> None:
    with pytest.raises(Failed, match=f"{10 + bodies} bodies and {10 + recorded} ended, where 10 and 10 are right"):
        complete(System(tmp_path, bodies=bodies, recorded=recorded), 10)


@pytest.mark.parametrize(("bodies", "recorded", "what"), [(-1, 0, "10 bodies"), (0, -1, "10 succeeded")])
def test_too_little_is_none_and_ends_the_senders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bodies: int, recorded: int, what: str
) -> None:
    monkeypatch.setattr(System, "DEADLINE_S", 0.05)
    system = System(tmp_path, bodies=bodies, recorded=recorded)
    with pytest.raises(Failed, match=f"not within 0.05 s: {what}"):
        complete(system, 10)
    assert system.senders[0].killed


def test_a_child_that_fails_fails_the_measurement() -> None:
    with pytest.raises(Failed, match=r"benchmarks.report.figures:median ended with 1:(?s:.)*no values"):
        call("benchmarks.report.figures:median", values=[])


def test_every_call_is_made_by_one_of_the_callers() -> None:
    assert shares(10, 4) == [3, 3, 2, 2]
    assert shares(5, 4) == [3, 2]
    assert shares(1, 4) == [1]


def test_callers_begin_together() -> None:
    late, early = (
        Child("tests.unit.benchmarks.gated:timed_after", gated=True, pause_s=pause_s, count=3) for pause_s in (0.5, 0.0)
    )
    answers = [child.result() for child in start_together([late, early])]
    assert min(answer["began_ns"] for answer in answers) > max(answer["first_ns"] for answer in answers)


def test_a_caller_that_fails_before_it_begins_ends_the_others() -> None:
    well = Child("tests.unit.benchmarks.gated:timed_after", gated=True, pause_s=0.0, count=3)
    broken = Child("benchmarks.report.figures:median", gated=True, values=[])
    with pytest.raises(Failed, match="no values"):
        start_together([well, broken])
    assert not well.alive
