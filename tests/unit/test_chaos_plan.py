"""The faults and figures of chaos runs: drawn from the seed alone, and counted from the history alone."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from tests.chaos.faults import BROKERS, COMMON, Broker, draw
from tests.chaos.figures import p50, recoveries
from tests.chaos.history import Beat, Ended, Enqueued, Event, Fault, Started
from tests.chaos.plans import FRESH, PLANS, limit_of, limited
from tests.chaos.run import mistakes
from tests.chaos.system import HEARTBEAT_TIMEOUT_S
from tests.chaos.work import draw_work


def ns(seconds: float) -> int:
    return round(seconds * 1e9)


@pytest.mark.parametrize("broker", ["redis", "rabbitmq"])
def test_a_seed_gives_its_faults_and_every_kind_comes_in_75_seconds(broker: Broker) -> None:
    planned = draw(1, 75, broker)
    assert planned == draw(1, 75, broker)
    assert planned != draw(2, 75, broker)
    assert {fault.kind for fault in planned} == {*COMMON, *BROKERS[broker]}
    assert [fault.at_s for fault in planned] == sorted(fault.at_s for fault in planned)


def test_a_longer_run_begins_like_a_shorter_one() -> None:
    short, long = draw(7, 30, "redis"), draw(7, 600, "redis")
    assert long[: len(short)] == short
    assert 100 < len(long) < 250


def test_a_seed_gives_its_work() -> None:
    work = list(islice(draw_work(1, "a", rate=1.5), 500))
    assert work == list(islice(draw_work(1, "a", rate=1.5), 500))
    assert work != list(islice(draw_work(1, "b", rate=1.5), 500))
    assert {one.plan for one in work} == set(PLANS)
    assert {one.task for one in work} == {"plain", "permit", "grouped", "die"}
    assert all((one.cancel_after_s is not None) == (one.plan == "cancel") for one in work)


@pytest.mark.parametrize("seed", range(20))
def test_long_bodies_outlive_a_heartbeat_and_leave_workers_free(seed: int) -> None:
    """Ten minutes: all begin at once, and those of an account of limit 1 one after the other. Of four workers' slots a
    service long bodies hardly ever take more than two."""
    at_s, free_s, spans = 0.0, 0.0, []
    for work in islice(draw_work(seed, "a", rate=1.5), 900):
        if work.plan == "succeed" and work.duration_s > 1:
            assert work.duration_s > HEARTBEAT_TIMEOUT_S
            assert not work.account or limit_of(work.account) == 1
            begin_s = max(at_s, free_s) if work.account else at_s
            spans.append((begin_s, begin_s + work.duration_s))
            free_s = begin_s + work.duration_s if work.account else free_s
        at_s += work.pause_s
    together = [sum(begin <= at < end for begin, end in spans) for at, _ in spans]
    assert max(together) <= 3
    assert together.count(3) < len(spans) / 20
    assert sum(end - begin for begin, end in spans) > at_s / 2, "faults find some"


def test_figures_are_counted_from_the_fault_that_hit() -> None:
    account = limited(f"{FRESH}:a", 1)

    def run(attempt: int, at_s: float) -> list[Event]:
        token = f"x-{attempt}"
        return [
            Beat(operation="x", token=token, time_ns=ns(at_s)),
            Started(
                operation="x",
                token=token,
                attempt=attempt,
                service="a",
                account="",
                group="",
                pid=attempt,
                time_ns=ns(at_s),
            ),
        ]

    probe = Started(
        operation="p", token="p-1", attempt=1, service="a", account=account, group="", pid=9, time_ns=ns(18)
    )
    events: list[Event] = [
        Enqueued(operation="x", service="a", plan="succeed", account="", time_ns=ns(1)),
        *run(1, 2),
        Fault(number=1, kind="holder-kill", target="holder", pids=(7,), time_ns=ns(5)),
        Fault(number=2, kind="worker-kill", target="a-prefork", pids=(1,), time_ns=ns(10)),
        Enqueued(operation="p", service="a", plan="succeed", account=account, time_ns=ns(12)),
        *run(2, 15),
        probe,
        Ended(operation="x", token="x-2", how="returned", time_ns=ns(19)),
    ]
    found = recoveries(events, heartbeat_timeout_s=4)
    assert found["worker-kill"].again_s == [5]
    assert found["worker-kill"].late_s == [9]
    assert found["worker-kill"].lanes == {FRESH: [6]}
    assert found["holder-kill"].faults == 1
    assert not found["holder-kill"].again_s
    assert p50([3, 1, 2]) == 2
    assert p50([]) is None


def test_an_error_of_a_program_in_a_log_is_found(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    lost = "delivery: BrokerUnavailable: the Celery broker does not answer"
    wrong = "operation x cannot be sent: AttributeError: 'NoneType' object has no attribute 'y'"
    (tmp_path / "a" / "dispatcher.log").write_text(f"{lost}\n{wrong}\n")
    assert mistakes(tmp_path) == [f"dispatcher: {wrong}"]
