"""The calculation for what no test machine can run, beside numbers computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import capacity
from benchmarks.capacity import Basis, Deployment, main, measured, measured_rates, needs, text
from benchmarks.protocol_costs import Costs, Exchange
from benchmarks.report import cost_table
from benchmarks.report.cost_table import PAGE, Step
from tests.unit.benchmarks.runs import run

DEPLOYMENT = Deployment(
    services=10,
    accounts=1_000,
    services_per_account=2,
    active=0.1,
    waiting=0.05,
    calls=100,
    cold=0.5,
    run_s=5,
    utilisation=0.5,
    retention_days=1,
    replication=3,
    brokers=3,
    read_mb=1,
    kept_days=1,
    operation_bytes=1_000,
    bloat=2,
)
BY = Basis(
    said=Costs(
        call=Exchange(2, 2, 400, 600),
        held=Exchange(864, 864, 86_400, 172_800),
        waiting=Exchange(432, 432, 43_200, 86_400),
        holder_row=200,
        holder_row_more=100,
        client_row=146,
    ),
    holder_rate=100,
    holder_cpu_rate=205,
    cold=Step(60, 8),
    leased=Step(28, 5),
)
STORED = run(
    "2026-11-02T10:00:00", {"holder": {"batches": [{"rate": rate, "rate_by_its_cpu_time": 9.0} for rate in (1, 2, 3)]}}
)


def test_reports_of_each_situation() -> None:
    found = needs(DEPLOYMENT, BY)
    assert found.call_reports == 100  # 50 calls without a lease a second, 2 each
    assert found.active_reports == pytest.approx(2)  # 200 pairs of account and service, 864 a day each
    assert found.waiting_reports == pytest.approx(0.5)  # 100 pairs, 432 a day each
    assert found.reports == found.replies == pytest.approx(102.5)


def test_what_kafka_carries() -> None:
    found = needs(DEPLOYMENT, BY)
    # 61 + 12 bytes around each message, and 11 of its key: 84 x 102.5 = 8,610 a second in each direction
    assert found.report_bytes == pytest.approx(50 * 400 + 200 + 50 + 8_610)
    assert found.reply_bytes == pytest.approx(50 * 600 + 400 + 100 + 8_610)
    assert found.kafka_out == pytest.approx(67_970)
    assert found.kafka_in == pytest.approx(203_910)
    assert found.kafka_stored == pytest.approx(17_617_824_000)


def test_what_holders_take() -> None:
    found = needs(DEPLOYMENT, BY)
    assert found.databases == 3  # 102.5 / (100 x 0.5) = 2.05
    assert found.holder_cores == pytest.approx(0.5)
    assert found.partitions == (3 * (12 + 1 + 1) + 10 * 4) * 3
    assert found.kafka_connections == (10 + 6) * 2 * 3
    assert found.holder_rows == pytest.approx(1_000 * 0.15 + 50 * 25)
    assert found.holder_bytes == pytest.approx(1_400 * (68 + 64 + 22 + 200 + 100) * 2)
    assert found.holder_connections == 12


def test_what_services_take() -> None:
    found = needs(DEPLOYMENT, BY)
    assert found.service_rows == pytest.approx(200 + 100 + 50 * 25)
    assert found.service_bytes == pytest.approx(1_550 * (68 + 64 + 22 + 146) * 2 + 100 * 86_400 * 1_000)
    assert found.service_statements == 50 * 60 + 50 * 28
    assert found.service_commits == 50 * 8 + 50 * 5


def test_a_rebuild_reads_what_is_kept_of_one_database_and_merges_it() -> None:
    found = needs(DEPLOYMENT, BY)
    assert found.rebuild_reports == pytest.approx(2_952_000)
    assert found.rebuild_s == pytest.approx(28_800 * (0.02886 + 1.025))


def test_accounts_in_which_nothing_happens_cost_nothing() -> None:
    ten_times = replace(DEPLOYMENT, accounts=10_000, active=0.01, waiting=0.005)
    assert needs(ten_times, BY) == needs(DEPLOYMENT, BY)


def test_steps_are_read_from_the_table_of_the_page() -> None:
    rows = ["| step | statements | commits | rows written |", "| --- | --- | --- | --- |", "| a | 1 | 2 | 3 |"]
    page = "\n".join([*rows, "| b | 4 | 5 | 6 |", "", "| c | 7 | 8 | 9 |"])
    steps = cost_table.read(page)
    assert steps == {"a": Step(1, 2), "b": Step(4, 5)}
    assert cost_table.total(steps, ["a", "b", "b"]) == Step(9, 12)
    with pytest.raises(ValueError, match="no table"):
        cost_table.read("no such page")


def test_the_page_has_the_steps_of_both_kinds_of_calls() -> None:
    by = measured((1, 1), PAGE.read_text())
    assert by.cold.statements > by.leased.statements > 0
    assert by.cold.commits > by.leased.commits > 0


def test_the_rate_of_a_holder_is_the_median_of_the_newest_run() -> None:
    assert measured_rates([STORED]) == (2, 9)
    assert measured_rates([run("2026-11-02T10:00:00", {})]) is None
    assert text([], PAGE.read_text()) == "Not measured yet: it takes the scenario `holder`."
    assert "| holder databases | " in text([STORED], PAGE.read_text())


def test_options_change_the_deployment(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["--holder-rate", "2000", "--calls", "0", "--active", "0.02", "--waiting", "0"]) == 0
    assert "10,000,000 accounts x 0.02 x 2 services x 288 a day" in capsys.readouterr().out


def test_without_a_measurement_the_rate_must_be_given(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "load_all", list)
    with pytest.raises(SystemExit):
        main([])
    assert "give --holder-rate" in capsys.readouterr().err
