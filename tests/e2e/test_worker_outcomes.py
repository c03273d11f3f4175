"""Every way a task can end, in a real worker of each pool: what its operation's row says, how often its body ran.

One worker runs all of them at once. Prefork and threads use PostgreSQL and Redis, spawn and solo SQLite and a folder as
the broker; prefork forwards its outcomes to Redis as the app's result backend.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from celery_durable import spool
from tests.e2e.worker_rig import POOLS, Rig, alive
from tests.harness import wait_until
from tests.services.postgresql import fresh_database

pytestmark = pytest.mark.processes

CHILDREN = ("prefork", "spawn")
QUICK = ("prefork", "threads", "solo")
"""Where a new child costs no new interpreter."""
BEYOND_HEARTBEAT_S = 5.0


@dataclass(frozen=True)
class Case:
    """A call, and what must come of it."""

    task: str
    args: tuple[Any, ...] = ()
    state: str = "succeeded"
    result: Any = None
    error: str = ""
    history: tuple[str, ...] = ()
    runs: int = 1
    losses: int = 0
    pools: tuple[str, ...] = POOLS
    hooks: tuple[str, ...] = field(default=())


def lost_twice(kind: str, error: str, pools: tuple[str, ...] = POOLS) -> Case:
    """A body that takes its worker's process with it: run again, and failed beyond its cap of one."""
    return Case("exit", (kind,), "failed", None, error, ("lost", "lost"), 2, 2, pools)


CASES = {
    "success": Case("add", (1, 2), result=3, hooks=("on_success",)),
    "success, acknowledged late": Case("late", (7,), result=7),
    "failure": Case("fail", ("no",), "failed", None, "ValueError: no", ("failed",), hooks=("on_failure",)),
    "retry": Case("flaky", (2,), result=2, history=("retried",) * 2, runs=3, hooks=("on_retry",) * 2 + ("on_success",)),
    "retries exhausted": Case("flaky", (9,), "failed", None, "flaky", (*("retried",) * 5, "failed"), 6),
    "retry with other arguments": Case("retry_args", ("first",), result="second", history=("retried",), runs=2),
    "autoretry_for": Case("auto", (2,), result=2, history=("retried",) * 2, runs=3),
    "autoretry_for exhausted": Case("auto", (5,), "failed", None, "auto", ("retried", "retried", "failed"), 3),
    "retry of an ignored result": Case("ignored_retry", result=None, history=("retried",), runs=2),
    "retry(throw=False)": Case("quiet_retry", result="second", history=("retried",), runs=2),
    "raise Retry by hand": Case("bare_retry", (), "failed", None, "use self.retry()", ("failed",)),
    "C12: a retry delay that is no number": Case("flaky", (1, float("nan")), "failed", None, "countdown", ("failed",)),
    "C12: a negative retry delay": Case("flaky", (1, -5), "failed", None, "countdown = -5", ("failed",)),
    "C12: a huge retry delay": Case("flaky", (1, 1e300), "failed", None, "countdown", ("failed",)),
    "C12: NaN in retry_kwargs": Case("bad_retry_kwargs", (), "failed", None, "countdown = nan", ("failed",)),
    "C12: a negative default_retry_delay": Case("bad_retry_delay", (), "failed", None, "countdown = -5", ("failed",)),
    "C12: a huge retry_backoff": Case("bad_retry_backoff", (), "failed", None, "further off than", ("failed",)),
    "C12: an endless retry_backoff": Case("endless_retry_backoff", (), "failed", None, "OverflowError", ("failed",)),
    "C12: a delay that raises": Case("raising_delay", (0,), "failed", None, "ZeroDivisionError", ("failed",)),
    "Ignore": Case("ignore"),
    "replace by a task": Case("replaced", (False,), "failed", None, "cannot become another task", ("failed",)),
    "replace by a chain": Case("replaced", (True,), "failed", None, "cannot become another task", ("failed",)),
    "Reject": Case("reject", (), "failed", None, "no good", ("failed",)),
    "Reject(requeue=True)": Case("requeue", ("{flag}",), result="done", history=("retried",), runs=2),
    "C10: a result that cannot be serialised": Case("unserialisable", (), "failed", None, "EncodeError", ("failed",)),
    "C10: an exception that cannot be pickled": Case("unpicklable", (), "failed", None, "Unpicklable", ("failed",)),
    "C10: an exception of 5 MB": Case("huge_error", (), "failed", None, "ValueError: xxx", ("failed",)),
    "C11: MemoryError": Case("exit", ("MemoryError",), "failed", None, "MemoryError: too much", ("failed",)),
    "CancelledError": Case("exit", ("CancelledError",), "failed", None, "CancelledError", ("failed",)),
    "C11: SystemExit": lost_twice("SystemExit", "SystemExit(3)", QUICK),
    "C11: KeyboardInterrupt": lost_twice("KeyboardInterrupt", "KeyboardInterrupt", QUICK),
    "C11: os._exit": lost_twice("_exit", "WorkerLostError", CHILDREN),
    "C15: a soft time limit": Case("soft", (False,), "failed", None, "SoftTimeLimit", ("failed",), pools=CHILDREN),
    "C15: a soft time limit that is caught": Case("soft", (True,), result="cleaned up", pools=CHILDREN),
    "C15: a soft time limit with a retry": Case(
        "soft_retried", (1,), result=1, history=("retried",), runs=2, pools=CHILDREN
    ),
    "C15: a soft time limit, retries exhausted": Case(
        "soft_retried", (9,), "failed", None, "SoftTimeLimit", (*("retried",) * 3, "failed"), 4, pools=CHILDREN
    ),
    "C15: a hard time limit": Case("hard", (False,), "failed", None, "TimeLimit", ("failed",), pools=CHILDREN),
    "C6: longer than the heartbeat timeout": Case("sleep", (BEYOND_HEARTBEAT_S,), result=BEYOND_HEARTBEAT_S),
}


@dataclass
class Running:
    """The rig of one pool, with every case's operation under way."""

    rig: Rig
    worker: Any
    ids: dict[str, str]


@pytest.fixture(scope="module", params=POOLS)
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A worker that was given every case that its pool can run."""
    pool = request.param
    folder = tmp_path_factory.mktemp(pool)
    if pool in ("prefork", "threads"):
        number = next(request.getfixturevalue("redis_numbers"))
        celery = {"broker_url": f"{request.getfixturevalue('redis_server')}/{number}"}
        if pool == "prefork":
            celery["result_backend"] = celery["broker_url"]
        with fresh_database(request.getfixturevalue("postgresql_server")) as url:
            yield from _running(request, folder, url, celery, pool)
    else:
        celery = {"broker_url": spool.url(folder / "broker")}
        yield from _running(request, folder, f"sqlite:///{folder / 'db.sqlite3'}", celery, pool)


def _running(
    request: pytest.FixtureRequest, folder: Path, url: str, celery: dict[str, Any], pool: str
) -> Iterator[Running]:
    rig = Rig(folder, url, celery, pool=pool)
    failed = request.session.testsfailed
    try:
        rig.dispatch()
        worker = rig.worker()
        ids = {}
        for name, case in CASES.items():
            if pool in case.pools:
                ids[name] = rig.call(case.task, *(rig.flag("r").as_posix() if a == "{flag}" else a for a in case.args))
        yield Running(rig, worker, ids)
    finally:
        if request.session.testsfailed > failed:
            print(rig.logs())
        rig.close()


@pytest.mark.parametrize("name", CASES)
def test_a_task_ends_as_its_row_says(running: Running, name: str) -> None:
    """C6, C10, C11, C12, C15, C20, D3: one outcome each, written once, and the body ran no more often than it says."""
    rig, case = running.rig, CASES[name]
    if rig.pool not in case.pools:
        pytest.skip(f"the {rig.pool} pool has no such end")
    operation_id = running.ids[name]
    row = rig.ended(operation_id)
    assert row.state == case.state, row.error
    assert case.error in (row.error or "")
    assert tuple(rig.history(operation_id)) == case.history
    assert rig.runs(operation_id) == case.runs
    assert row.worker_losses == case.losses
    assert row.alive_until is None
    assert len(row.error or "") <= 20_000
    assert len(row.result or b"") <= 20_000
    result = rig.result(operation_id)
    if case.state == "succeeded":
        assert result.get(timeout=1) == case.result
    else:
        assert isinstance(result.get(timeout=1, propagate=False), Exception)
        assert result.state == "FAILURE"
    if case.hooks:
        wait_until(
            lambda: tuple(e["event"] for e in rig.records(operation_id) if e["event"] != "start") == case.hooks,
            what=f"hooks {case.hooks}",
        )


def test_the_worker_lives_and_takes_the_next_task(running: Running) -> None:
    """C20: whatever the bodies did, the worker lives."""
    for operation_id in running.ids.values():
        running.rig.ended(operation_id)
    assert running.worker.alive
    assert running.rig.result(running.rig.call("add", 20, 22)).get(timeout=30) == 42


def test_a_message_that_comes_again_runs_nothing(running: Running) -> None:
    """C5: delivered several times, at once and after the end, it runs once; no copy settles or changes anything."""
    rig = running.rig
    flag = rig.flag("duplicate")
    operation_id = rig.call("wait", str(flag))
    rig.started(operation_id)
    rig.publish(operation_id, copies=3)
    marker = rig.call("add", 1, 1)
    if rig.pool != "solo":
        rig.ended(marker)
    flag.touch()
    row = rig.ended(operation_id)
    rig.publish(operation_id, copies=2)
    rig.ended(rig.call("add", 1, 1))
    rig.ended(marker)
    assert (row.state, rig.runs(operation_id), rig.history(operation_id)) == ("succeeded", 1, [])
    assert rig.row(operation_id) == row
    assert rig.log_has(f"wait[{operation_id}] not started")


def test_a_message_of_another_sender_is_refused(running: Running) -> None:
    """Sent by name past the dispatcher, it is never run ungated: rejected, with a log that says what to do."""
    rig = running.rig
    sent = rig.app.send_task("add", (1, 2), ignore_result=True)
    wait_until(lambda: rig.log_has(f"add[{sent.id}] not started"), what="refusal in the log")
    assert rig.log_has("enqueue with .delay() or .apply_async()")
    assert rig.runs(sent.id) == 0


def test_a_cancelled_attempt_is_stopped(running: Running) -> None:
    """A25: the heartbeat sees the request; the body is stopped as by a soft time limit; the row ends as cancelled."""
    rig = running.rig
    operation_id = rig.call("sleep", 60)
    rig.started(operation_id)
    assert rig.result(operation_id).cancel("not needed") == "requested"
    row = rig.ended(operation_id, 10)
    assert row.state == "cancelled"
    (stopped,) = rig.records(operation_id, "stopped")
    assert (stopped["error"], stopped["soft"]) == ("AttemptAborted", True)
    assert running.worker.alive


def test_an_attempt_that_lost_its_operation_is_refused(running: Running) -> None:
    """C26: a body that swallows the abort ends in a settle that is refused; the row is not its own any more."""
    rig = running.rig
    flag = rig.flag("swallow")
    operation_id = rig.call("swallow", str(flag))
    rig.started(operation_id)
    operations = rig.runtime.tables.operations
    with rig.runtime.database.transaction() as connection:
        connection.execute(
            operations.update()
            .where(operations.c.id == operation_id)
            .values(state="failed", run_token=None, alive_until=None, ended_at=1, error="taken away")
        )
    wait_until(lambda: rig.records(operation_id, "swallowed"), 10, what="abort in the body")
    flag.touch()
    wait_until(lambda: rig.log_has(f"Settle of operation {operation_id} refused"), 10, what="refusal")
    row = rig.row(operation_id)
    assert (row.state, row.error, row.result) == ("failed", "taken away", None)
    assert rig.records(operation_id, "on_success") == []


def test_a_worker_never_loads_kafka(running: Running) -> None:
    """Rule 3: neither the main process nor a child, however many tasks they ran."""
    rig = running.rig
    starts = rig.records(event="start")
    assert starts
    assert not any(start["imported"] for start in starts)
    main = psutil.Process(running.worker.pid)
    for process in (main, *main.children(recursive=True)):
        maps = Path(f"/proc/{process.pid}/maps")
        assert "librdkafka" not in maps.read_text()
        assert "confluent_kafka" not in maps.read_text()


def test_children_share_no_connection(running: Running) -> None:
    """C18: the main process of a prefork worker keeps no database connection open that a new child would inherit."""
    rig = running.rig
    if rig.pool not in CHILDREN:
        pytest.skip("its worker has one process")
    for operation_id in running.ids.values():
        rig.ended(operation_id)
    main = psutil.Process(running.worker.pid)
    port = rig.runtime.database.url.port
    if port is None:
        wait_until(lambda: not [f for f in main.open_files() if "db.sqlite3" in f.path], what="no SQLite file open")
        return
    wait_until(lambda: not [c for c in main.net_connections("tcp") if c.raddr and c.raddr.port == port], what="none")
    sockets = [
        connection.laddr.port
        for child in main.children()
        for connection in child.net_connections("tcp")
        if connection.raddr and connection.raddr.port == port
    ]
    assert sockets
    assert len(sockets) == len(set(sockets))


def test_a_hard_time_limit_settles_when_the_child_is_gone(running: Running) -> None:
    """C21: once, and only then, although the body resists SIGTERM."""
    rig = running.rig
    if rig.pool not in CHILDREN:
        pytest.skip("its worker has no process to kill")
    operation_id = rig.call("hard", True)
    pid = rig.started(operation_id)["pid"]
    _never_free_while_alive(rig, operation_id, pid)
    row = rig.ended(operation_id)
    assert (row.state, rig.history(operation_id), rig.runs(operation_id)) == ("failed", ["failed"], 1)


def test_a_terminated_task_settles_when_the_child_is_gone(running: Running) -> None:
    """C21: ``terminate=True`` frees the permit when the process has ended, not when the signal was sent."""
    rig = running.rig
    if rig.pool not in CHILDREN:
        pytest.skip("its worker has no process to kill")
    operation_id = rig.call("sleep", 60)
    pid = rig.started(operation_id)["pid"]
    rig.app.control.revoke(operation_id, terminate=True, signal="SIGTERM")
    _never_free_while_alive(rig, operation_id, pid)
    row = rig.ended(operation_id)
    assert (row.state, rig.runs(operation_id)) == ("cancelled", 1)
    # "revoked": its heartbeats were overdue first, and the worker refused the next attempt.
    assert row.error in {"terminated", "revoked"}


def _never_free_while_alive(rig: Rig, operation_id: str, pid: int) -> None:
    def freed() -> bool:
        was_alive = alive(pid)
        if rig.row(operation_id).state == "running":
            return False
        assert not was_alive or not alive(pid)
        return True

    wait_until(freed, 20, what="end of the attempt")


def test_a_killed_child_is_a_lost_attempt(running: Running) -> None:
    """C1: killed once, it runs again; killed every time, it fails after its cap."""
    rig = running.rig
    if rig.pool != "prefork":
        pytest.skip("its worker has no process to kill, or one that is slow to come again")
    first, second = rig.flag("killed-once"), rig.flag("killed-twice")
    once, twice = rig.call("wait", str(first)), rig.call("wait", str(second))
    psutil.Process(rig.started(once)["pid"]).send_signal(signal.SIGKILL)
    for count in (1, 2):
        psutil.Process(rig.started(twice, count)["pid"]).send_signal(signal.SIGKILL)
    rig.started(once, 2)
    first.touch()
    assert (rig.ended(once).state, rig.history(once), rig.runs(once)) == ("succeeded", ["lost"], 2)
    row = rig.ended(twice)
    assert (row.state, rig.history(twice), rig.runs(twice), row.worker_losses) == ("failed", ["lost", "lost"], 2, 2)
    assert "WorkerLostError" in row.error


def test_outcomes_are_told_to_the_apps_own_backend(running: Running) -> None:
    """What waits on Redis, such as a chord, sees what SQL says."""
    rig = running.rig
    if rig.pool != "prefork":
        pytest.skip("only this rig has a result backend of its own")
    backend = rig.app.backend
    for name, state in (
        ("success", "SUCCESS"),
        ("failure", "FAILURE"),
        ("retry", "SUCCESS"),
        ("Reject", "FAILURE"),
        ("C15: a hard time limit", "FAILURE"),
        ("C10: a result that cannot be serialised", "FAILURE"),
        ("C11: SystemExit", "FAILURE"),
    ):
        operation_id = running.ids[name]
        rig.ended(operation_id)
        wait_until(lambda: backend.get_state(operation_id) == state, what=f"{name}: {state} in Redis")  # noqa: B023
    assert backend.get_result(running.ids["success"]) == 3
