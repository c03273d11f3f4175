"""What the pictures show."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import plots
from benchmarks.report.figures import Spread
from benchmarks.scenarios import SCENARIOS
from tests.unit.benchmarks.runs import grown, rates, run

RUN = run(
    "2026-11-02T10:00:00",
    {
        "end-to-end": {"celery-durable": rates(100, 300, 200), "DBOS": rates(100)},
        "idle-start": {"warm lease": rates(1)},
    },
)


def test_a_picture_is_about_what_the_goals_are_about() -> None:
    assert plots.figures_of("end-to-end") == ["rate"]
    assert plots.figures_of("release") == ["p50_ms", "p99_ms"]
    assert all(plots.figures_of(scenario.name) or scenario.axis for scenario in SCENARIOS.values())


def test_a_bar_is_the_median_and_the_ends() -> None:
    measured = RUN.scenarios["end-to-end"]
    assert plots.bars(measured, "rate") == {"celery-durable": Spread(200, 100, 300), "DBOS": Spread(100, 100, 100)}
    assert plots.bars(measured, "p50_ms") == {}


def test_each_scenario_has_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="make bench installs matplotlib")
    plots.write({"end-to-end": RUN}, tmp_path / "pictures")
    picture = tmp_path / "pictures" / "end-to-end.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


GROWN = grown((10.0, {"rate": 90.0, "p50_ms": 2.0, "p99_ms": 4.0}), (0.0, {"rate": 100.0, "p50_ms": 1.0}))


def test_a_curve_goes_along_the_axis() -> None:
    assert plots.curve(GROWN, "rate") == [(0.0, Spread(100, 100, 100)), (10.0, Spread(90, 90, 90))]
    assert plots.curve(GROWN, "p99_ms") == [(10.0, Spread(4, 4, 4))]


def test_what_grows_has_a_picture_from_zero_on(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="make bench installs matplotlib")
    measured = run("2026-11-02T10:00:00", {})
    measured.scenarios["growth-waiting"] = GROWN
    plots.write({"growth-waiting": measured}, tmp_path)
    assert (tmp_path / "growth-waiting.png").read_bytes().startswith(b"\x89PNG")
