"""Stopping a body, and heartbeats, in threads of the test."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from celery_durable.store.attempts import Ending
from celery_durable.worker import abort, runs
from celery_durable.worker.abort import AttemptAborted
from celery_durable.worker.heartbeat import Heart, _Sleeper
from celery_durable.worker.runs import Phase, Run, Stop
from tests.harness import wait_until, within
from tests.unit.worker.rows import Rows, attempt


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Leaves the process's signal handler as it was."""
    present = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, present)


def make_run(operation_id: str = "op", timeout_s: float = 1.0) -> Run:
    """A run of the calling thread, in its body, under its operation's ID as the token."""
    run = Run(
        attempt(operation_id, token=operation_id), in_child=False, retries=0, timeout_s=timeout_s, requeue_after_s=30
    )
    runs.add(run)
    abort.enter_body(run)
    return run


def soon(action: object, *args: object) -> threading.Thread:
    """Calls it in another thread, in a moment."""
    thread = threading.Timer(0.1, action, args)  # type: ignore[arg-type]
    thread.start()
    return thread


def test_the_main_thread_is_stopped_at_once_in_a_blocking_call() -> None:
    run = make_run()
    thread = soon(abort.stop, run, Stop.LOST)
    try:
        with (
            within(30, "the end of a sleep of 60 s"),
            pytest.raises(AttemptAborted, match="another attempt owns") as aborted,
        ):
            time.sleep(60)
        assert isinstance(aborted.value, SoftTimeLimitExceeded)
    finally:
        thread.join()
        runs.remove(run)


def test_another_thread_is_stopped() -> None:
    seen: list[BaseException] = []
    ready = threading.Event()
    run_of: list[Run] = []

    def body() -> None:
        run = make_run()
        run_of.append(run)
        ready.set()
        try:
            while True:
                time.sleep(0.01)
        except AttemptAborted as error:
            seen.append(error)
        finally:
            abort.leave_body(run)
            runs.remove(run)

    thread = threading.Thread(target=body)
    thread.start()
    assert ready.wait(10)
    assert abort.stop(run_of[0], Stop.CANCELLED)
    assert not abort.stop(run_of[0], Stop.LATE)
    thread.join(10)
    assert not thread.is_alive()
    assert len(seen) == 1


def test_what_was_on_its_way_is_taken_back_when_the_body_ends() -> None:
    """A thread that blocks in C gets the exception later, in the settle: it must not."""
    problems: list[BaseException] = []

    def body() -> None:
        try:
            for _ in range(200):
                run = make_run()
                stopper = threading.Thread(target=abort.stop, args=(run, Stop.LOST))
                try:
                    stopper.start()
                    time.sleep(0)
                except AttemptAborted:
                    pass
                abort.leave_body(run)
                stopper.join()
                sum(range(1_000))
                runs.remove(run)
        except BaseException as error:  # noqa: BLE001 - it is what the test looks for
            problems.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert problems == []


TRACED_AFTERWARDS = """
import sys, threading
from celery_durable.worker import abort, runs
from celery_durable.worker.runs import Stop
from tests.unit.worker.test_abort import make_run

def body():
    run = make_run()
    try:
        stopper = threading.Thread(target=abort.stop, args=(run, Stop.LOST))
        stopper.start()
        stopper.join()
    except abort.AttemptAborted:
        pass
    abort.leave_body(run)
    runs.remove(run)

thread = threading.Thread(target=body)
thread.start()
thread.join()
sys.settrace(lambda *_: None)
(lambda: None)()
"""


def test_an_interruption_leaves_no_mark_on_the_interpreter() -> None:
    """Python 3.11 marks that an exception is pending; with one that never comes, a traced call hangs."""
    subprocess.run([sys.executable, "-c", TRACED_AFTERWARDS], check=True, timeout=60)


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.SETTLING, Phase.SETTLED])
def test_nothing_but_a_body_is_interrupted(phase: Phase) -> None:
    run = make_run()
    run.phase = phase
    try:
        assert not abort.stop(run, Stop.LOST)
    finally:
        runs.remove(run)


def test_a_soft_time_limit_reaches_the_body_and_spares_the_settle() -> None:
    def celerys(*_: object) -> None:
        raise SoftTimeLimitExceeded

    signal.signal(signal.SIGUSR1, celerys)
    run = make_run()
    try:
        with pytest.raises(SoftTimeLimitExceeded):
            signal.raise_signal(signal.SIGUSR1)
        abort.leave_body(run)
        signal.raise_signal(signal.SIGUSR1)
    finally:
        runs.remove(run)
    with pytest.raises(SoftTimeLimitExceeded):
        signal.raise_signal(signal.SIGUSR1)


@pytest.fixture
def rows(tmp_path: Path) -> Iterator[Rows]:
    rows = Rows.create(f"sqlite:///{tmp_path / 'db.sqlite3'}")
    yield rows
    rows.database.dispose()


def start(rows: Rows, heart: Heart, timeout_s: float) -> Run:
    operation_id = rows.admit()
    begun = time.monotonic()
    assert rows.attempts.start(
        attempt(operation_id, token=operation_id), worker="w", timeout_ms=round(timeout_s * 1000)
    )
    run = make_run(operation_id, timeout_s)
    heart.watch(run, begun=begun)
    return run


def test_heartbeats_go_on_until_their_own_run_ends(rows: Rows) -> None:
    """C13: also while its settle is slow; and when it has ended they stop, while another's go on."""
    heart = Heart(rows.database, rows.attempts, interval_s=0.05)
    ending = start(rows, heart, timeout_s=60)
    staying = start(rows, heart, timeout_s=60)
    abort.leave_body(ending)

    def beaten(run: Run) -> None:
        alive_until = rows.row(run.attempt.id).alive_until
        wait_until(lambda: rows.row(run.attempt.id).alive_until > alive_until, 10, what="heartbeat")

    try:
        beaten(ending)
        beaten(staying)
        runs.remove(ending)
        beaten(staying)  # one that was under way for the other is over with this
        alive_until = rows.row(ending.attempt.id).alive_until
        beaten(staying)
        beaten(staying)
        assert rows.row(ending.attempt.id).alive_until == alive_until
        assert (ending.stop, staying.stop) == (None, None)
    finally:
        runs.remove(staying)


def test_a_run_that_no_row_knows_is_stopped(rows: Rows) -> None:
    heart = Heart(rows.database, rows.attempts, interval_s=0.05)
    run = start(rows, heart, timeout_s=60)
    try:
        rows.attempts.succeed(run.attempt, Ending())
        with pytest.raises(AttemptAborted):
            time.sleep(20)
        assert run.stop is Stop.LOST
    finally:
        runs.remove(run)


def test_an_attempt_that_cannot_renew_stops_before_its_time_is_over(rows: Rows) -> None:
    """C13: not at once, by its own clock from the start of its last good heartbeat; meanwhile the database is tried."""

    class Broken:
        tries = 0

        def beat(self, *_: object, **__: object) -> None:
            self.tries += 1
            raise OSError("away")

    broken = Broken()
    heart = Heart(rows.database, broken, interval_s=0.1)  # type: ignore[arg-type]
    begun = time.monotonic()
    run = start(rows, heart, timeout_s=1.0)
    started = time.monotonic()
    try:
        with (
            within(30, "the end of a sleep of 60 s"),
            pytest.raises(AttemptAborted, match="could not be renewed"),
        ):
            time.sleep(60)
        assert run.stop is Stop.LATE
        assert begun + 0.8 < run.stop_at < started + 0.95
        assert time.monotonic() >= run.stop_at
        assert broken.tries >= 2
    finally:
        runs.remove(run)


def test_helper_threads_leave_signals_to_the_main_thread() -> None:
    """C9 (a cold shutdown): billiard blocks SIGTERM in a child's main thread while it holds the lock of the queue that
    all children write to; delivered to another thread it would end the child there, and the worker never."""
    blocked: list[set[int]] = []

    def step() -> float:
        blocked.append({int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())})
        return float("inf")

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    _Sleeper("test", step).by(0)
    wait_until(lambda: blocked, 10)
    assert {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1} <= blocked[0]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
