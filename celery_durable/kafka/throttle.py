"""Warnings that a broken surrounding would repeat without end, said once in a while."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable


class Throttled:
    """Logs a warning of one kind at most once in ``interval_s`` seconds. For one thread."""

    def __init__(self, logger: logging.Logger, interval_s: float = 60.0) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._last: dict[Hashable, float] = {}

    def warning(self, kind: Hashable, message: str, *args: object) -> None:
        """Logs ``message % args``, unless a warning of this ``kind`` was logged within the interval."""
        now = time.monotonic()
        if now - self._last.get(kind, float("-inf")) >= self._interval_s:
            self._last[kind] = now
            self._logger.warning(message, *args)
