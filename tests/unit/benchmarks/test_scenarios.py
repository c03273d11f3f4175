"""The list of scenarios, and which of them are chosen."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from benchmarks.__main__ import choose, main, measured_names
from benchmarks.scenario import Bench, Scenario
from benchmarks.scenarios import GROUPS, SCENARIOS
from benchmarks.setting.servers import Servers


def test_without_names_all_are_measured() -> None:
    assert choose([], quick=False) == list(SCENARIOS.values())
    assert choose(["release"], quick=False) == [SCENARIOS["release"]]


def test_the_quick_comparison_leaves_out_what_takes_long() -> None:
    names = {scenario.name for scenario in choose([], quick=True)}
    assert "end-to-end" in names
    assert "backlog" not in names


def test_a_group_stands_for_its_scenarios_each_once() -> None:
    chosen = [scenario.name for scenario in choose(["growth-limits", "growth", "release"], quick=False)]
    assert chosen == ["growth-limits", *(name for name in GROUPS["growth"] if name != "growth-limits"), "release"]


def test_a_quick_run_of_what_grows_measures_its_smallest_points() -> None:
    assert measured_names(SCENARIOS["growth-accounts"], ["1", "10", "100"], quick=True) == ["1", "10"]
    assert measured_names(SCENARIOS["growth-accounts"], ["1", "10", "100"], quick=False) == ["1", "10", "100"]
    assert measured_names(SCENARIOS["idle-start"], ["other", "warm lease"], quick=True) == ["warm lease"]
    assert measured_names(SCENARIOS["release"], ["one", "two", "three"], quick=True) == ["one", "two", "three"]


@pytest.mark.parametrize("name", GROUPS["growth"])
def test_what_grows_is_measured_along_its_axis(name: str) -> None:
    with ExitStack() as handles, SCENARIOS[name].contenders(Bench(Servers(handles))) as contenders:
        places = [contender.at for contender in contenders.values()]
        assert [f"{at:,.0f}" for at in places if at is not None] == list(contenders)
        assert len(places) >= 3


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["no-such"])
    assert ended.value.code == 2
    assert "no scenario no-such; there are enqueue-one" in capsys.readouterr().err


def test_the_list_names_every_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(SCENARIOS)


def test_counts_follow_the_scale_down_to_what_still_says_something() -> None:
    with ExitStack() as handles:
        bench = Bench(Servers(handles), 0.1)
        assert (bench.count(3_000), bench.count(50), bench.count(50, least=5)) == (300, 20, 5)


@pytest.mark.parametrize("scenario", [one for one in SCENARIOS.values() if one.quick], ids=lambda one: one.name)
def test_what_is_quick_is_measured_otherwise_too(scenario: Scenario) -> None:
    with ExitStack() as handles, scenario.contenders(Bench(Servers(handles))) as contenders:
        assert set(scenario.quick) <= set(contenders)
