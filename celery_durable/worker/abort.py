"""Stops an attempt while its body runs: by a signal to the main thread, or by an asynchronous exception elsewhere.

Only the body is interrupted. Once it has ended, nothing is raised any more: an outcome that is being settled is
either written whole or refused.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded

from celery_durable.worker import runs
from celery_durable.worker.runs import Phase, Run, Stop

_SIGNAL = signal.SIGUSR1
"""Celery's own for soft time limits, so that the pools leave it unblocked; other uses of it are passed on."""


class AttemptAborted(SoftTimeLimitExceeded):
    """Raised in a body that must stop: its attempt was lost, or its operation cancelled.

    A body may clean up when it sees this, as at a soft time limit; what it returns or raises then is not recorded if
    another attempt owns the operation.
    """

    def __str__(self) -> str:
        run = runs.of_thread(threading.get_ident())
        return (
            "The attempt must stop" if run is None or run.stop is None else f"The attempt must stop: {run.stop.value}"
        )


def stop(run: Run, reason: Stop) -> bool:
    """Interrupts the attempt if its body runs and was not interrupted before. Called by another thread."""
    with run.lock:
        if run.stop is not None or run.phase is not Phase.BODY:
            return False
        run.stop = reason
        if run.thread_id == threading.main_thread().ident and signal.getsignal(_SIGNAL) is _handler:
            signal.pthread_kill(run.thread_id, _SIGNAL)
        else:
            run.interrupting = True
            _raise_in(run.thread_id, AttemptAborted)
    runs.counters["stopped"] += 1
    return True


def enter_body(run: Run) -> None:
    """From here on the attempt may be interrupted."""
    if run.thread_id == threading.main_thread().ident:
        _install()
    run.phase = Phase.BODY


def leave_body(run: Run) -> None:
    """From here on nothing interrupts the calling thread; an interruption on its way comes and is caught here."""
    while run.phase is Phase.BODY or run.interrupting:
        try:
            with run.lock:
                run.phase = Phase.SETTLING
            if run.interrupting:
                _meet_interruption(run)
        except AttemptAborted:
            run.interrupting = False


def _meet_interruption(run: Run) -> None:
    """Has the one interruption of the run, which may have come already, come (again) now.

    To take it back would leave CPython's mark of a pending exception set: on 3.11 all evaluation in the process then
    takes its slow path for good, and what is traced (a debugger, coverage) hangs.
    """
    _raise_in(run.thread_id, AttemptAborted)
    while run.interrupting:
        pass


def _raise_in(thread_id: int, exception: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(exception))


_previous: Callable[[int, FrameType | None], Any] | int | None = None


def _install() -> None:
    # At the first attempt and not before: billiard sets its own handler after the pool's initializer has run.
    global _previous  # noqa: PLW0603
    present = signal.getsignal(_SIGNAL)
    if present is not _handler:
        _previous = present
        signal.signal(_SIGNAL, _handler)


def _handler(number: int, frame: FrameType | None) -> None:
    run = runs.of_thread(threading.get_ident())
    if run is not None:
        if run.stop is not None and not run.interrupted:
            run.interrupted = True
            if run.phase is Phase.BODY:
                raise AttemptAborted
            return
        if run.phase is Phase.SETTLING:
            return  # a soft time limit that comes when the body has ended would tear the settle
    if callable(_previous):
        _previous(number, frame)
