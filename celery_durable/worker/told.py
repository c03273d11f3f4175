"""Marks of ends that were told: deleted many at once, so that telling costs an operation no write of its own."""

from __future__ import annotations

import math
import threading
import time

from celery.utils.log import get_logger

from celery_durable.store.attempts import Attempts
from celery_durable.store.untold import Mark

logger = get_logger(__name__)

_EVERY_S = 1.0
"""Well below the grace after which a dispatcher tells an end itself."""


class Told:
    """The marks that this process is to delete. For any thread. One that is never deleted costs being told twice."""

    def __init__(self, attempts: Attempts) -> None:
        self._attempts = attempts
        self._lock = threading.Lock()
        self._marks: list[Mark] = []
        self._due_at = math.inf

    def add(self, mark: Mark) -> float:
        """Takes a mark on; returns when the next :meth:`step` is due (monotonic)."""
        with self._lock:
            self._marks.append(mark)
            self._due_at = min(self._due_at, time.monotonic() + _EVERY_S)
            return self._due_at

    def step(self) -> float:
        """Deletes what is due; returns when it is due again (monotonic)."""
        if self._due_at <= time.monotonic():
            self.flush()
        return self._due_at

    def flush(self) -> None:
        """Deletes all of them. Where the database is away they are tried again later."""
        with self._lock:
            marks, self._marks, self._due_at = self._marks, [], math.inf
        if not marks:
            return
        try:
            self._attempts.told(marks)
        except Exception as error:  # noqa: BLE001 - what was told is told
            logger.info("%d marks of what was told are kept for now: %s", len(marks), error)
            for mark in marks:
                self.add(mark)
