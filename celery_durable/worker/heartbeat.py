"""Keeps the attempts of one process alive, and stops those that are no longer its own.

Two daemon threads, started by the first attempt after any fork: one renews ``alive_until`` in SQL, and takes back the
marks of ends that were told; one watches the monotonic clock alone, so that a database that hangs cannot keep an
attempt going beyond its time. Both sleep while nothing is due, and cost an attempt that ends before its first heartbeat
nothing.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable

from celery.utils.log import get_logger

from celery_durable.store.attempts import Attempts, OperationHeld
from celery_durable.store.database import Database
from celery_durable.store.untold import Mark
from celery_durable.worker import runs
from celery_durable.worker.abort import stop
from celery_durable.worker.runs import Phase, Run, Stop
from celery_durable.worker.told import Told
from celery_durable.worker.transient import is_transient

logger = get_logger(__name__)

_RETRY_S = 0.25
"""Pause after a failed heartbeat."""


class Heart:
    """The heartbeats of this process's attempts."""

    def __init__(self, database: Database, attempts: Attempts, *, interval_s: float) -> None:
        self._database = database
        self._attempts = attempts
        self._interval_s = interval_s
        self._told = Told(attempts)
        self._beats = _Sleeper("celery-durable-heartbeat", self._step)
        self._clock = _Sleeper("celery-durable-deadline", self._stop_late)

    def in_time(self, run: Run, *, begun: float) -> bool:
        """Whether the body may begin: not where the process stood still for too long since ``begun`` (monotonic)."""
        self._renewed(run, begun)
        return time.monotonic() < run.stop_at

    def watch(self, run: Run, *, begun: float) -> None:
        """Takes on an attempt whose row is alive for its timeout after ``begun`` (monotonic) at least."""
        self._renewed(run, begun)
        self._beats.by(run.beat_at)
        self._clock.by(run.stop_at)

    def told(self, mark: Mark) -> None:
        """The end of an attempt was told: its mark is deleted soon, with those of others."""
        self._beats.by(self._told.add(mark))

    def flush(self) -> None:
        """Deletes the marks of what was told, before the process ends."""
        self._told.flush()

    def _step(self) -> float:
        return min(self._beat_due(), self._told.step())

    def _renewed(self, run: Run, begun: float) -> None:
        run.beat_at = begun + min(self._interval_s, run.timeout_s / 3)
        run.stop_at = begun + run.timeout_s - min(5.0, run.timeout_s / 10)

    def _beat_due(self) -> float:
        now = time.monotonic()
        for run in runs.active():
            if run.beat_at <= now and run.phase is not Phase.SETTLED:
                self._beat(run)
        return min((run.beat_at for run in runs.active()), default=math.inf)

    def _beat(self, run: Run) -> None:
        begun = time.monotonic()
        try:
            beat = self._attempts.beat(run.attempt.id, run.attempt.token, timeout_ms=round(run.timeout_s * 1000))
        except OperationHeld as held:
            run.beat_at = begun + _RETRY_S
            logger.info("Heartbeat waits: %s", held)
            return
        except Exception as error:  # noqa: BLE001 - tried again until the deadline's thread stops the attempt
            self._database.drop_held()
            run.beat_at = begun + _RETRY_S
            log = logger.warning if is_transient(error) else logger.error
            log("Heartbeat of operation %s failed: %s: %s", run.attempt.id, type(error).__name__, error)
            return
        if beat is None:
            run.beat_at = math.inf
            self._stop(run, Stop.LOST)
            return
        self._renewed(run, begun)
        if beat.cancel_requested:
            self._stop(run, Stop.CANCELLED)

    def _stop_late(self) -> float:
        now = time.monotonic()
        for run in runs.active():
            if run.stop_at <= now and run.phase is Phase.BODY:
                self._stop(run, Stop.LATE)
        waiting = (run.stop_at for run in runs.active() if run.stop is None and run.phase is Phase.BODY)
        return min(waiting, default=math.inf)

    def _stop(self, run: Run, reason: Stop) -> None:
        if stop(run, reason):
            logger.warning("Stopping attempt %d of operation %s: %s", run.attempt.attempt, run.attempt.id, reason.value)


class _Sleeper:
    """A daemon thread that calls ``step`` whenever it is due; ``step`` returns when it is due again (monotonic)."""

    def __init__(self, name: str, step: Callable[[], float]) -> None:
        self._name = name
        self._step = step
        self._thread: threading.Thread | None = None
        self._condition = threading.Condition()
        self._due_at = math.inf

    def by(self, due_at: float) -> None:
        """Has the next step come at ``due_at`` at the latest. Wakes the thread only if it would sleep longer."""
        if self._thread is not None and self._due_at <= due_at:
            return
        with self._condition:
            self._due_at = min(self._due_at, due_at)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                # Signals are the main thread's: where it blocks SIGTERM, as billiard does while it writes to the queue
                # that all children share, a thread that does not would let it end the process inside that lock.
                mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
                try:
                    self._thread.start()
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            self._condition.notify()

    def _run(self) -> None:
        while True:
            with self._condition:
                while (pause_s := self._due_at - time.monotonic()) > 0:
                    self._condition.wait(None if math.isinf(pause_s) else pause_s)
                self._due_at = math.inf
            due_at = self._step()
            with self._condition:
                self._due_at = min(self._due_at, due_at)
