"""Stored runs."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.report.record import RESULTS, dump, load_all, newest_of_each, parse, store
from benchmarks.scenarios import SCENARIOS
from tests.unit.benchmarks.runs import grown, rates, run

OLD = run("2026-11-01T10:00:00", {"end-to-end": {"celery-durable": rates(1)}, "release": {"celery-durable": rates(2)}})
NEW = run("2026-11-02T10:00:00", {"end-to-end": {"celery-durable": rates(3)}})


def test_a_run_comes_back_as_it_was(tmp_path: Path) -> None:
    assert parse(dump(OLD)) == OLD
    assert store(NEW, tmp_path).name == "2026-11-02T1000Z-0123456.json"
    store(OLD, tmp_path)
    assert load_all(tmp_path) == [OLD, NEW]


def test_the_axis_comes_back_and_older_runs_have_none() -> None:
    stored = run("2026-11-02T10:00:00", {})
    stored.scenarios["growth-accounts"] = grown((1.0, {"rate": 2.0}), (1_000.0, {"rate": 1.0}))
    again = parse(dump(stored)).scenarios["growth-accounts"]
    assert (again.axis, again.at) == ("accounts", {"1": 1.0, "1,000": 1_000.0})
    old = json.loads(dump(OLD))
    for measured in old["scenarios"].values():
        del measured["axis"], measured["at"]
    assert parse(json.dumps(old)) == OLD


def test_the_newest_run_of_a_scenario_counts() -> None:
    assert newest_of_each([NEW, OLD]) == {"end-to-end": NEW, "release": OLD}


def test_what_is_stored_can_be_read_and_names_no_path_of_a_machine() -> None:
    for stored in load_all():
        assert stored.scenarios
        for name, measured in stored.scenarios.items():
            assert all(len(samples) >= SCENARIOS[name].repetitions for samples in measured.samples.values())
    for path in RESULTS.glob("*.json"):
        assert "/tmp/" not in path.read_text()
