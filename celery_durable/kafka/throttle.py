"""Warnings that a broken surrounding would repeat without end, said once in a while."""

from __future__ import annotations

import logging
import re
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


class NotRepeated(logging.Filter):
    """Lets a record through once in ``interval_s`` seconds; numbers in its text make no difference.

    For the logger of a library that tries again and again, and says so each time.
    """

    _KINDS_MAX = 1_000

    def __init__(self, interval_s: float = 60.0) -> None:
        super().__init__()
        self._interval_s = interval_s
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged."""
        kind = re.sub(r"\d+", "0", record.getMessage())
        now = time.monotonic()
        if now - self._last.get(kind, float("-inf")) < self._interval_s:
            return False
        if len(self._last) >= self._KINDS_MAX:
            self._last.clear()
        self._last[kind] = now
        return True
