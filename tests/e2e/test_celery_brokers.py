"""What Celery's brokers do to messages of their own accord: they deliver again what was not acknowledged in time.

A worker on Redis and one on RabbitMQ, both with a patience of a second or two; the rows say how often anything ran.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import unavailable
from tests.e2e.worker_rig import HEARTBEAT_TIMEOUT_S, Rig
from tests.harness import wait_until
from tests.services import RabbitMQ, ServiceUnavailable

pytestmark = pytest.mark.processes

PATIENCE_S = 1
"""How long a broker waits for an acknowledgement: less than any task here takes."""
REQUEUE_AFTER_S = 6.0
SETTLE_MS = 200
"""Longer than one statement takes on a busy machine."""
_FORGETFUL_RABBITMQ = (
    f"application:set_env(rabbit, consumer_timeout, {PATIENCE_S * 1000}), "
    "application:set_env(rabbit, channel_tick_interval, 300)."
)


@pytest.fixture(scope="module")
def rabbitmq() -> Iterator[RabbitMQ]:
    """A RabbitMQ that closes channels which leave a message unacknowledged for long."""
    try:
        server = RabbitMQ()
    except ServiceUnavailable as error:
        unavailable(error)
        raise
    with server:
        server.control("eval", _FORGETFUL_RABBITMQ)
        yield server


@pytest.fixture(params=[pytest.param("redis", marks=pytest.mark.redis), "rabbitmq"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    """A service on the broker. Its dispatcher sends nothing again within a test: what comes twice, the broker sent."""
    celery: dict[str, Any]
    if request.param == "redis":
        # kombu looks for what was not acknowledged at every tenth of these intervals.
        patience = {"visibility_timeout": PATIENCE_S, "unacked_restore_interval": 0.05}
        celery = {"broker_url": request.getfixturevalue("redis_url"), "broker_transport_options": patience}
    else:
        celery = {"broker_url": request.getfixturevalue("rabbitmq").new_vhost(), "worker_enable_remote_control": False}
    url = f"sqlite:///{tmp_path / 'db.sqlite3'}"
    rig = Rig(tmp_path, url, celery, pool="prefork", resend_min_s=120.0, requeue_after_s=REQUEUE_AFTER_S)
    failed = request.session.testsfailed
    try:
        rig.dispatch()
        yield rig
    finally:
        if request.session.testsfailed > failed:
            print(rig.logs())
        rig.close()


def test_a_task_longer_than_any_timeout_runs_once(rig: Rig) -> None:
    """C6: longer than the heartbeat timeout, and than the broker waits for an acknowledgement: heartbeats keep it, and
    what Redis delivers again while it runs is not run again. (A message that is acknowledged late has its worker ended
    by RabbitMQ's ``consumer_timeout``: Celery takes that for an unrecoverable error.)"""
    rig.worker(concurrency=3)
    flag = rig.flag("go")
    again = rig.app.conf.broker_url.startswith("redis:")
    ids = {name: rig.call(name, str(flag)) for name in ("early_wait", *(["wait"] if again else []))}
    for operation_id in ids.values():
        rig.started(operation_id)
    first = {operation_id: rig.row(operation_id) for operation_id in ids.values()}
    if again:
        text = f"wait[{ids['wait']}] not started"
        wait_until(lambda: rig.log_has(text), 60, what="the broker's own second delivery")
    for operation_id, row in first.items():
        beyond_ms = row.started_at + HEARTBEAT_TIMEOUT_S * 2_000
        wait_until(lambda: rig.row(operation_id).alive_until > beyond_ms, what="heartbeats")  # noqa: B023
        assert rig.row(operation_id).state == "running"
    flag.touch()
    for operation_id, before in first.items():
        row = rig.ended(operation_id)
        assert (row.state, row.attempt, row.sends, row.run_token) == ("succeeded", 1, 1, before.run_token)
        assert (rig.runs(operation_id), rig.history(operation_id)) == (1, [])
    assert rig.result(rig.call("add", 20, 22)).get(timeout=30) == 42


def test_a_retry_later_than_any_timeout_runs_once_and_on_time(rig: Rig) -> None:
    """C8: a countdown longer than the broker waits for an acknowledgement, with the permit kept, and given back: the
    next attempt starts once, and not before its time."""
    rig.worker(concurrency=2)
    delays = {
        rig.call(task, 1, countdown_s): (countdown_s, state)
        for task in ("flaky", "late_flaky")
        for countdown_s, state in ((REQUEUE_AFTER_S - 0.5, "retrying"), (REQUEUE_AFTER_S, "scheduled"))
    }
    for operation_id, (_, state) in delays.items():
        wait_until(lambda: rig.history(operation_id), what="the first attempt's end")  # noqa: B023
        assert rig.row(operation_id).state == state
    for operation_id, (countdown_s, _) in delays.items():
        row = rig.ended(operation_id)
        (first,) = rig.attempts(operation_id)
        # Within the statement that settles the database's clock goes on, and what is due is computed first.
        assert row.started_at - first.ended_at >= countdown_s * 1_000 - SETTLE_MS
        assert (row.state, row.attempt, row.worker_losses) == ("succeeded", 2, 0)
        assert (rig.runs(operation_id), rig.history(operation_id)) == (2, ["retried"])
        assert rig.result(operation_id).get(timeout=1) == 1


def test_a_warm_shutdown_hands_back_what_was_prefetched(rig: Rig) -> None:
    """C9: SIGTERM with messages prefetched, acknowledged early and late: the running attempt settles, none of the
    others fails or is lost, and the broker delivers them again: nobody sends them a second time."""
    worker = rig.worker(concurrency=1)
    flag = rig.flag("go")
    running = rig.call("wait", str(flag))
    rig.started(running)
    waiting = [rig.call("add", 1, 1), rig.call("late", 2), rig.call("late", 2)]
    for operation_id in waiting:
        wait_until(lambda: rig.log_has(f"[{operation_id}] received"), what=f"{operation_id} is prefetched")  # noqa: B023
    assert [rig.row(each).state for each in waiting] == ["admitted"] * 3
    threading.Timer(0.5, flag.touch).start()
    assert worker.terminate(30) == 0
    assert rig.row(running).state == "succeeded"
    assert {rig.row(each).state for each in waiting} <= {"admitted", "succeeded"}
    rig.worker(concurrency=1)
    for operation_id in waiting:
        assert rig.result(operation_id).get(timeout=30) == 2
        row = rig.row(operation_id)
        assert (row.attempt, row.sends, row.worker_losses) == (1, 1, 0)
    assert [(rig.runs(each), rig.history(each)) for each in (running, *waiting)] == [(1, [])] * 4
