"""Workers that are killed, frozen or cut off from their database: what the operation's row says afterwards."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from celery_durable import spool
from tests.e2e.worker_rig import HEARTBEAT_TIMEOUT_S, Rig
from tests.harness import wait_until
from tests.services import PostgreSQL

pytestmark = pytest.mark.processes

MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[MakeRig]:
    """Makes a rig on SQLite and a folder as the broker, unless told otherwise; closes it at the end."""
    with ExitStack() as stack:

        def make(pool: str, url: str = "", **durable: Any) -> Rig:
            url = url or f"sqlite:///{tmp_path / 'db.sqlite3'}"
            rig = Rig(tmp_path, url, {"broker_url": spool.url(tmp_path / "broker")}, pool=pool, **durable)
            stack.callback(rig.close)
            stack.callback(lambda: print(rig.logs()))
            return rig

        yield make


def test_killed_after_settle_before_acknowledge(make_rig: MakeRig) -> None:
    """C2: the message comes again, cannot start what has ended, and is acknowledged; the result stays."""
    rig = make_rig("prefork")
    rig.dispatch()
    worker = rig.worker(concurrency=1)
    flag = rig.flag("linger")
    operation_id = rig.call("linger", str(flag))
    wait_until(lambda: rig.records(operation_id, "settled"), what="settle")
    row = rig.row(operation_id)
    assert row.state == "succeeded"
    worker.kill()
    rig.publish(operation_id)
    rig.worker(concurrency=1)
    wait_until(lambda: rig.log_has(f"linger[{operation_id}] not started"), what="the copy's refusal")
    assert rig.row(operation_id) == row
    assert rig.runs(operation_id) == 1


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_frozen_beyond_its_time(make_rig: MakeRig, pool: str) -> None:
    """C3: a worker that was stopped past ``alive_until`` stops its attempt when it continues, and settles nothing."""
    rig = make_rig(pool)
    rig.dispatch()
    frozen = rig.worker(concurrency=1)
    flag = rig.flag("go")
    operation_id = rig.call("wait", str(flag))
    rig.started(operation_id)
    frozen.freeze()
    wait_until(lambda: rig.history(operation_id) == ["lost"], what="loss of the first attempt")
    rig.worker(concurrency=1)
    rig.started(operation_id, 2)
    frozen.thaw()
    wait_until(lambda: rig.log_has(f"Settle of operation {operation_id} refused"), what="refusal of the first attempt")
    assert rig.row(operation_id).state == "running"
    flag.touch()
    row = rig.ended(operation_id)
    assert (row.state, row.attempt, rig.history(operation_id), rig.runs(operation_id)) == ("succeeded", 2, ["lost"], 2)
    assert rig.result(operation_id).get(timeout=1) == "waited"


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_body_that_holds_the_gil(make_rig: MakeRig, pool: str) -> None:
    """C26: no heartbeat can run beside it: its attempt is lost, counted and capped, and its settle refused."""
    rig = make_rig(pool)
    rig.dispatch()
    rig.worker(concurrency=1)
    operation_id = rig.call("hold_gil", HEARTBEAT_TIMEOUT_S * 2)
    row = rig.ended(operation_id)
    assert (row.state, row.worker_losses, rig.history(operation_id)) == ("failed", 1, ["lost"])
    wait_until(lambda: rig.log_has(f"Settle of operation {operation_id} refused"), what="refusal")
    assert rig.row(operation_id) == row
    assert rig.result(rig.call("add", 1, 2)).get(timeout=30) == 3


def test_a_killed_worker(make_rig: MakeRig) -> None:
    """C1: main process and children killed: run again by another worker once the heartbeats are overdue."""
    rig = make_rig("prefork")
    rig.dispatch()
    worker = rig.worker(concurrency=1)
    flag = rig.flag("go")
    operation_id = rig.call("wait", str(flag))
    rig.started(operation_id)
    worker.kill()
    rig.worker(concurrency=1)
    rig.started(operation_id, 2)
    flag.touch()
    assert (rig.ended(operation_id).state, rig.history(operation_id)) == ("succeeded", ["lost"])


@pytest.mark.parametrize(("pool", "away_s"), [("prefork", 0.2), ("prefork", 3.0), ("threads", 3.0)])
@pytest.mark.postgresql
def test_database_away(make_rig: MakeRig, own_postgresql: PostgreSQL, pool: str, away_s: float) -> None:
    """C14, C25: PostgreSQL killed at start, settle and retry: everything is recorded as it was, once."""
    with own_postgresql.new_database() as url:
        rig = make_rig(pool, url, heartbeat_timeout_s=20.0, heartbeat_interval_s=1.0)
        rig.dispatch()
        worker = rig.worker(concurrency=4)
        flag = rig.flag("go")
        settling = rig.call("wait", str(flag))
        retrying = rig.call("wait_and_retry", str(flag))
        rig.started(settling)
        rig.started(retrying)
        worker.freeze()
        starting = rig.call("add", 1, 2)
        wait_until(lambda: rig.row(starting).sends, what="delivery")
        own_postgresql.kill()
        worker.thaw()
        flag.touch()
        wait_until(lambda: rig.log_has(f"Settle of operation {settling}: "), what="a failed try")
        time.sleep(away_s)  # the fault itself
        own_postgresql.start()
        assert rig.result(settling).get(timeout=30) == "waited"
        assert rig.result(retrying).get(timeout=30) == 1
        assert rig.result(starting).get(timeout=30) == 3
        assert (rig.history(settling), rig.runs(settling)) == ([], 1)
        assert (rig.history(retrying), rig.runs(retrying)) == (["retried"], 2)
        assert (rig.history(starting), rig.runs(starting)) == ([], 1)
        for operation_id in (settling, retrying, starting):
            assert rig.row(operation_id).worker_losses == 0
        rig.close()


def test_sqlite_locked(make_rig: MakeRig) -> None:
    """C25: another process holds SQLite's write lock for 3 s: what finished is no failure."""
    rig = make_rig("prefork")
    rig.dispatch()
    rig.worker(concurrency=2)
    flag = rig.flag("go")
    operation_id = rig.call("wait", str(flag))
    rig.started(operation_id)
    with rig.locked():
        flag.touch()
        time.sleep(3)  # the fault itself
    row = rig.ended(operation_id)
    assert row.state == "succeeded"
    assert rig.runs(operation_id) - 1 == row.worker_losses == len(rig.history(operation_id))


def test_cut_off_from_the_database_it_stops_in_time(make_rig: MakeRig) -> None:
    """Section 6: an attempt that cannot renew its life stops by its own clock, before that is over."""
    rig = make_rig("prefork")
    rig.dispatch()
    rig.worker(concurrency=1)
    operation_id = rig.call("sleep", 60)
    rig.started(operation_id)
    alive_until = rig.row(operation_id).alive_until
    with rig.locked():
        wait_until(lambda: rig.records(operation_id, "stopped"), 10, what="stop")
        assert rig.row(operation_id).alive_until >= alive_until
        assert rig.row(operation_id).alive_until > time.time() * 1000 - 200
    rig.started(operation_id, 2)
    assert rig.history(operation_id) == ["lost"]
    assert rig.row(operation_id).worker_losses == 1


def test_a_stop_costs_no_retry_of_celerys(make_rig: MakeRig) -> None:
    """C13: ``autoretry_for`` that takes the stop of an attempt for a failure of its body: it is counted as a loss."""
    rig = make_rig("prefork")
    rig.dispatch()
    rig.worker(concurrency=1)
    flag = rig.flag("go")
    operation_id = rig.call("eager_to_retry", str(flag))
    rig.started(operation_id)
    with rig.locked():
        wait_until(lambda: rig.records(operation_id, "stopped"), 10, what="stop")
    rig.started(operation_id, 2)
    flag.touch()
    row = rig.ended(operation_id)
    assert (row.state, row.worker_losses, row.retries, rig.history(operation_id)) == ("succeeded", 1, 0, ["lost"])


@pytest.mark.postgresql
def test_a_held_row_stalls_no_other_attempt(make_rig: MakeRig, postgresql_url: str) -> None:
    """C13: a user's transaction holds the row of one attempt (a cancel that is not committed): the heartbeats of its
    neighbours in the same process go on, and so does its own when the row is free again in time."""
    rig = make_rig("threads", postgresql_url, heartbeat_timeout_s=8.0, heartbeat_interval_s=0.3)
    rig.dispatch()
    rig.worker(concurrency=2)
    flag = rig.flag("go")
    held, other = rig.call("early_wait", str(flag)), rig.call("early_wait", str(flag))
    rig.started(held)
    rig.started(other)
    operations = rig.runtime.tables.operations
    with rig.runtime.database.transaction() as connection:
        connection.execute(select(operations).where(operations.c.id == held).with_for_update())
        for _ in range(5):
            alive_until = rig.row(other).alive_until
            wait_until(lambda: rig.row(other).alive_until > alive_until, 4, what="a heartbeat")  # noqa: B023
        stale = rig.row(held).alive_until
    wait_until(lambda: rig.row(held).alive_until > stale, 10, what="its own heartbeat")
    flag.touch()
    for operation_id in (held, other):
        row = rig.ended(operation_id)
        assert (row.state, row.attempt, rig.history(operation_id)) == ("succeeded", 1, [])


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_an_exit_that_takes_the_whole_worker(make_rig: MakeRig, pool: str) -> None:
    """C11: ``os._exit`` in a worker of one process: lost, counted, and failed beyond the cap."""
    rig = make_rig(pool)
    rig.dispatch()
    operation_id = rig.call("exit", "_exit")
    for count in (1, 2):
        worker = rig.worker(concurrency=1, ready=False)
        rig.started(operation_id, count)
        worker.wait(30)
    row = rig.ended(operation_id)
    assert (row.state, row.worker_losses, rig.history(operation_id)) == ("failed", 2, ["lost", "lost"])
    assert "max_worker_losses = 1" in row.error
    rig.worker(concurrency=1)
    assert rig.result(rig.call("add", 1, 2)).get(timeout=30) == 3
    assert rig.runs(operation_id) == 2


def test_a_body_that_swallows_every_stop(make_rig: MakeRig) -> None:
    """C26: lost twice while it goes on: counted, failed beyond the cap, and what both bodies return is refused."""
    rig = make_rig("prefork")
    rig.dispatch()
    worker = rig.worker(concurrency=2)
    flag = rig.flag("go")
    operation_id = rig.call("swallow", str(flag))
    for count in (1, 2):
        rig.started(operation_id, count)
        worker.freeze()
        wait_until(lambda: len(rig.history(operation_id)) == count, what="its loss")  # noqa: B023
        worker.thaw()
    row = rig.ended(operation_id)
    assert (row.state, row.worker_losses, rig.history(operation_id)) == ("failed", 2, ["lost", "lost"])
    wait_until(lambda: len(rig.records(operation_id, "swallowed")) == 2, what="both bodies swallow their stop")
    flag.touch()
    refused = f"Settle of operation {operation_id} refused"
    wait_until(lambda: rig.logs().count(refused) == 2, what="two refusals")
    assert rig.row(operation_id) == row
    assert rig.records(operation_id, "on_success") == []


def test_a_warm_shutdown_finishes_what_runs(make_rig: MakeRig) -> None:
    """C9: SIGTERM: the running attempt settles; what was prefetched is not failed, and runs in the next worker."""
    rig = make_rig("prefork")
    rig.dispatch()
    worker = rig.worker(concurrency=1)
    flag = rig.flag("go")
    first, second = rig.call("wait", str(flag)), rig.call("late", 2)
    rig.started(first)
    wait_until(lambda: rig.row(second).sends, what="delivery of the second")
    threading.Timer(1.0, flag.touch).start()
    assert worker.terminate(30) == 0
    assert rig.row(first).state == "succeeded"
    rig.worker(concurrency=1)
    assert rig.result(second).get(timeout=30) == 2
    assert (rig.runs(first), rig.runs(second), rig.history(second)) == (1, 1, [])


def test_a_cold_shutdown_ends_the_worker_and_loses_nothing(make_rig: MakeRig) -> None:
    """C9: Ctrl-C twice: running attempts are ended and made again by the next worker, and this one does not hang."""
    rig = make_rig("prefork")
    rig.dispatch()
    worker = rig.worker(concurrency=2)
    flag = rig.flag("go")
    running = [rig.call("wait", str(flag)) for _ in range(2)]
    for operation_id in running:
        rig.started(operation_id)
    worker.send(signal.SIGINT)
    # Only from then on does a second one mean something else.
    wait_until(lambda: "Warm shutdown" in worker.log_tail(), what="the warm shutdown")
    worker.send(signal.SIGINT)
    worker.wait(30)
    flag.touch()
    rig.worker(concurrency=2)
    for operation_id in running:
        rig.ended(operation_id)
        assert rig.row(operation_id).state == "succeeded"
