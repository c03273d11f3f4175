"""A loop is fast while there is work, slow when idle, and outlives its errors."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable

import pytest

from celery_durable.scheduling.loop import ERROR_PAUSE_MIN_S, SWITCH_S, Loop, quick_turns, stop_all

IDLE = float("inf")
DEADLINE_S = 20


def looped(step: Callable[[], float | None], **options: object) -> Loop:
    """A started loop that, left alone, would pause for minutes when idle."""
    loop = Loop("test", step, **{"pause_min_s": 300, "pause_max_s": 300, **options})  # type: ignore[arg-type]
    loop.start()
    return loop


def test_a_step_that_worked_is_called_again_at_once() -> None:
    steps, idle = iter([None, None, None]), threading.Event()

    def step() -> float | None:
        if next(steps, IDLE) is None:
            return None
        idle.set()
        return IDLE

    loop = looped(step)
    assert idle.wait(DEADLINE_S)
    assert stop_all([loop], DEADLINE_S) == []


def test_a_wake_ends_the_pause() -> None:
    called = threading.Semaphore(0)

    def step() -> float:
        called.release()
        return IDLE

    loop = looped(step)
    for _ in range(3):
        assert called.acquire(timeout=DEADLINE_S)
        loop.wake()
    assert stop_all([loop], DEADLINE_S) == []


def test_a_sooner_time_that_the_step_names_ends_the_pause() -> None:
    called = threading.Semaphore(0)

    def step() -> float:
        called.release()
        return 0.01

    loop = looped(step)
    assert all(called.acquire(timeout=DEADLINE_S) for _ in range(3))
    assert stop_all([loop], DEADLINE_S) == []


def test_an_idle_pause_grows_to_its_longest() -> None:
    times: list[float] = []
    enough = threading.Event()

    def step() -> float:
        times.append(time.monotonic())
        if len(times) == 6:
            enough.set()
        return IDLE

    loop = looped(step, pause_min_s=0.01, pause_max_s=0.04)
    assert enough.wait(DEADLINE_S)
    assert stop_all([loop], DEADLINE_S) == []
    pauses = [later - sooner for sooner, later in itertools.pairwise(times)]
    assert all(pause >= wanted for pause, wanted in zip(pauses, (0.01, 0.02, 0.04, 0.04, 0.04), strict=False))


def test_a_failing_step_is_told_backs_off_and_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """Case F5: a failing part re-arms itself, backs off and reports."""
    times: list[float] = []
    over = threading.Event()

    def step() -> float:
        times.append(time.monotonic())
        if len(times) <= 2:
            raise OSError(f"try {len(times)}")
        over.set()
        return IDLE

    with caplog.at_level(logging.WARNING):
        loop = looped(step)
        assert over.wait(DEADLINE_S)
        assert stop_all([loop], DEADLINE_S) == []
    assert [record.getMessage() for record in caplog.records] == [
        "test: OSError: try 1; again in 0.1 s",
        "test: OSError: try 2; again in 0.2 s",
    ]
    assert times[1] - times[0] >= ERROR_PAUSE_MIN_S
    assert times[2] - times[1] >= 2 * ERROR_PAUSE_MIN_S


def test_stopping_ends_a_pause_and_calls_on_end_in_the_thread() -> None:
    ended: list[str] = []
    loop = looped(lambda: IDLE, on_end=lambda: ended.append(threading.current_thread().name))
    assert not loop.stopping
    assert stop_all([loop], DEADLINE_S) == []
    assert loop.stopping
    assert ended == ["test"]


def test_a_loop_that_does_not_end_in_time_is_named() -> None:
    release, entered = threading.Event(), threading.Event()

    def step() -> float:
        entered.set()
        release.wait(DEADLINE_S)
        return IDLE

    loop = looped(step)
    assert entered.wait(DEADLINE_S)
    assert stop_all([loop], 0.05) == ["test"]
    release.set()
    assert loop.join(DEADLINE_S)


def test_a_step_that_exits_does_not_end_the_loop() -> None:
    """Users' code runs in steps (signal handlers, errbacks): its ``sys.exit()`` would end the thread without a word."""
    calls, again = itertools.count(), threading.Event()

    def step() -> float:
        if next(calls) == 0:
            raise SystemExit(3)
        again.set()
        return IDLE

    loop = looped(step)
    assert again.wait(DEADLINE_S)
    assert stop_all([loop], DEADLINE_S) == []


def test_threads_take_quick_turns_until_the_last_that_wants_them_leaves() -> None:
    before_s = sys.getswitchinterval()
    first, second = quick_turns(), quick_turns()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == before_s
