"""What waits for an operation's end outside of SQL: chords in Redis, errbacks. It is told, whatever dies in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import chord

from celery_durable import spool
from tests.crashing.orders import Orders
from tests.e2e.worker_rig import Rig
from tests.harness import wait_until
from tests.services import Redis

pytestmark = [pytest.mark.processes, pytest.mark.redis]

MakeRig = Callable[..., Rig]
IMPATIENT = {"retry_policy": {"max_retries": 1, "interval_start": 0, "interval_step": 0.1, "timeout": 1.0}}


@pytest.fixture
def make_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeRig]:
    """Makes a prefork rig on SQLite and a folder as the broker, with the result backend."""
    rigs: list[Rig] = []

    def make(result_backend: str | None, database: str = "") -> Rig:
        celery: dict[str, Any] = {"broker_url": spool.url(tmp_path / "broker"), "result_backend": result_backend}
        celery["result_backend_transport_options"] = IMPATIENT
        rig = Rig(tmp_path, database or f"sqlite:///{tmp_path / 'db.sqlite3'}", celery, pool="prefork")
        rig.dispatch()
        rigs.append(rig)
        return rig

    failed = request.session.testsfailed
    yield make
    for rig in rigs:
        if request.session.testsfailed > failed:
            print(rig.logs())
        rig.close()


def told(rig: Rig) -> None:
    """Waits until no mark is left."""
    wait_until(lambda: not rig.untold(), 60, what="all is told")


@pytest.mark.parametrize("body", ["total", "plain_total"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_while_it_tells(make_rig: MakeRig, redis_url: str, tmp_path: Path, moment: str, body: str) -> None:
    """C23: killed with SIGKILL between the settle and telling Redis, and between that and forgetting that it is to be
    told: the chord completes, its body runs once, and so did every member."""
    rig = make_rig(redis_url)
    orders = Orders(tmp_path / "orders")
    orders.give(f"worker.outcome.{moment}_publish:2")
    worker = rig.worker(concurrency=1, env=orders.env)
    add, tasks = rig.app.tasks["add"], rig.app.tasks
    result = chord([add.s(number, number) for number in range(3)], app=rig.app)(tasks[body].s())
    point = f"worker.outcome.{moment}_publish"
    wait_until(lambda: orders.died(point), 60, what="the child's death")
    worker.kill()
    orders.withdraw()
    assert len(rig.untold()) == 2 or moment == "after"
    rig.worker(concurrency=1)
    wait_until(lambda: rig.app.backend.get_state(result.id) == "SUCCESS", 60, what="the chord's body")
    assert rig.app.backend.get_result(result.id) == 6
    told(rig)
    members = [each.id for each in result.parent]
    assert [rig.app.backend.get_state(each) for each in members] == ["SUCCESS"] * 3
    assert [rig.runs(each) for each in (*members, result.id)] == [1] * 4
    assert [rig.history(each) for each in members] == [[]] * 3


def test_ends_that_no_worker_saw(make_rig: MakeRig, redis_url: str) -> None:
    """C23: a chord of which one member was cancelled, or expired, before any worker had it ends as failed."""
    rig = make_rig(redis_url)
    add, total = rig.app.tasks["add"], rig.app.tasks["total"]
    bodies = {}
    for what, options in (("cancelled", {"countdown": 600}), ("expired", {"countdown": 600, "expires": 0.5})):
        bodies[what] = chord([add.s(1, 1), add.s(2, 2).set(**options)], app=rig.app)(total.s())
    rig.worker(concurrency=1)
    for what, body in bodies.items():
        done, waiting = body.parent
        rig.ended(done.id)
        if what == "cancelled":
            waiting.revoke()
        wait_until(lambda: rig.app.backend.get_state(body.id) == "FAILURE", 60, what=what)  # noqa: B023
        assert rig.row(waiting.id).state == "cancelled"
        assert rig.app.backend.get_state(waiting.id) == "REVOKED"
        assert rig.runs(body.id) == 0
    told(rig)


def test_an_operation_that_no_worker_survives(make_rig: MakeRig, redis_url: str) -> None:
    """C23: lost with its whole worker, every time: Redis is told of the failure, and its errback is called."""
    rig = make_rig(redis_url)
    result = rig.app.tasks["hold_gil"].apply_async((60,), link_error=rig.app.tasks["errback"].s())
    worker = rig.worker(concurrency=1)
    rig.started(result.id)
    worker.kill()
    row = rig.ended(result.id)
    assert (row.state, rig.history(result.id)) == ("failed", ["lost"])
    wait_until(lambda: rig.app.backend.get_state(result.id) == "FAILURE", 60, what="Redis knows")
    rig.worker(concurrency=1)
    wait_until(lambda: [each["of"] for each in rig.records(event="errback")] == [result.id], 60, what="the errback")
    told(rig)


@pytest.mark.parametrize("backend", [None, "durable://"])
def test_killed_before_the_errback(make_rig: MakeRig, tmp_path: Path, backend: str | None) -> None:
    """C23: killed between the settle of a failure and its errback, with no result backend to tell: it is called."""
    rig = make_rig(backend)
    orders = Orders(tmp_path / "orders")
    orders.give("worker.fail.after_commit:1")
    worker = rig.worker(concurrency=1, env=orders.env)
    result = rig.app.tasks["fail"].apply_async(("no",), link_error=rig.app.tasks["errback"].s())
    wait_until(lambda: orders.died("worker.fail.after_commit"), 60, what="the child's death")
    worker.kill()
    assert (rig.row(result.id).state, rig.untold()) == ("failed", [result.id])
    assert not rig.records(event="errback")
    orders.withdraw()
    rig.worker(concurrency=1)
    wait_until(lambda: [each["of"] for each in rig.records(event="errback")] == [result.id], 60, what="the errback")
    told(rig)
    assert rig.runs(result.id) == 1


def test_a_result_backend_that_is_away(make_rig: MakeRig, own_redis: Redis, postgresql_url: str) -> None:
    """C23: Redis is away when the members settle: the chord completes when it is back; nothing else waits for that."""
    rig = make_rig(own_redis.url(), postgresql_url)
    rig.worker(concurrency=2)
    flag = rig.flag("go")
    wait = rig.app.tasks["wait"]
    body = chord([wait.s(str(flag)), wait.s(str(flag))], app=rig.app)(rig.app.tasks["plain_count"].s())
    for each in body.parent:
        rig.started(each.id)
    own_redis.kill()
    flag.touch()
    for each in body.parent:
        assert rig.ended(each.id).state == "succeeded"
    wait_until(lambda: rig.log_has("was not told; a dispatcher will"), 60, what="the worker's word")
    assert len(rig.untold()) == 2
    own_redis.start()
    wait_until(lambda: rig.app.backend.get_state(body.id) == "SUCCESS", 60, what="the chord's body")
    assert rig.app.backend.get_result(body.id) == 2
    told(rig)
    assert rig.runs(body.id) == 1


def test_what_is_told_in_time_is_told_once(make_rig: MakeRig, redis_url: str) -> None:
    """C23: where nothing dies the worker forgets what it has told by itself, and no dispatcher tells it again."""
    rig = make_rig(redis_url)
    rig.worker(concurrency=2)
    first = [rig.call("add", number, 1) for number in range(20)]
    for operation_id in first:
        rig.ended(operation_id)
    told(rig)
    assert not rig.log_has("was not told")
