"""The attempts that this process runs, each under its run token. Never by operation ID: with threads a stale attempt
would settle its successor's row."""

from __future__ import annotations

import os
import threading
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from celery_durable.message import RUN_HEADER
from celery_durable.store.attempts import Attempt

if TYPE_CHECKING:
    from celery_durable.message import CapturedMessage


class Phase(Enum):
    """Where an attempt is. It may be interrupted in its body only."""

    STARTING = auto()
    BODY = auto()
    SETTLING = auto()
    SETTLED = auto()


class Stop(Enum):
    """Why an attempt was told to stop."""

    LOST = "another attempt owns the operation, or it ended"
    LATE = "its heartbeats could not be renewed in time"
    CANCELLED = "the operation was cancelled"


@dataclass(eq=False)
class Run:
    """One attempt while this process runs it."""

    attempt: Attempt
    in_child: bool
    """It runs in a pool's child process: the main process settles it if this one dies."""
    retries: int
    timeout_s: float
    requeue_after_s: float
    thread_id: int = field(default_factory=threading.get_ident)
    phase: Phase = Phase.STARTING
    stop: Stop | None = None
    staged: CapturedMessage | None = None
    """The retry that the body asked for, until the settle writes it."""
    state: str | None = None
    """The operation's state after this attempt's settle; None: not settled yet."""
    refused: bool = False
    """When it came to settle, the operation was no longer this attempt's."""
    forwarded: bool = False
    """The app's result backend was told the outcome."""
    beat_at: float = 0.0
    """Monotonic time of the next heartbeat."""
    stop_at: float = 0.0
    """Monotonic time by which the body must stop, unless a heartbeat succeeds before."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    interrupting: bool = False
    """An asynchronous exception was sent to its thread and not taken back."""
    interrupted: bool = False
    """The signal that stops it has arrived."""


counters: Counter[str] = Counter()
"""Of this process: settles ``refused``, attempts ``stopped``, messages ``dropped`` because they could not start."""

_runs: dict[str, Run] = {}
_by_thread: dict[int, Run] = {}


def add(run: Run) -> None:
    """Makes the attempt known to the backend, the heartbeats and the signal handler."""
    _runs[run.attempt.token] = run
    _by_thread[run.thread_id] = run


def remove(run: Run) -> None:
    """Forgets the attempt; its heartbeats end."""
    run.phase = Phase.SETTLED
    _runs.pop(run.attempt.token, None)
    if _by_thread.get(run.thread_id) is run:
        del _by_thread[run.thread_id]


def of_thread(thread_id: int) -> Run | None:
    """The attempt that the thread runs now."""
    return _by_thread.get(thread_id)


def of_request(request: Any) -> Run | None:
    """The attempt behind a task's request (a ``Context``), if this process runs it."""
    header = getattr(request, RUN_HEADER, None)
    return _runs.get(header["token"]) if isinstance(header, dict) else None


def active() -> list[Run]:
    """The attempts that this process runs now."""
    return list(_runs.values())


def _after_fork() -> None:
    _runs.clear()
    _by_thread.clear()


os.register_at_fork(after_in_child=_after_fork)
