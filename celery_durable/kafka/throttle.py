"""What a broken surrounding says without end: first as information, as a warning if it lasts, then now and then."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Hashable
from dataclasses import dataclass

LASTS_S = 5.0
"""What still comes so long after its first time is no passing fault: a fresh broker, a topic that was just made."""
KINDS_MAX = 1_000


@dataclass(slots=True)
class _Fault:
    first: float
    last: float
    warned: float | None = None


class Faults:
    """Decides how loud a fault is that comes again and again. For one thread.

    :param interval_s: seconds between two warnings of one kind, and without one after which it is a new fault.
    """

    def __init__(self, interval_s: float = 60.0) -> None:
        self._interval_s = interval_s
        self._known: dict[Hashable, _Fault] = {}

    def level(self, kind: Hashable, lasting: int = logging.WARNING) -> int | None:
        """The level to log it at now, ``lasting`` if it lasts; None: not at all."""
        now = time.monotonic()
        fault = self._known.get(kind)
        if fault is None or now - fault.last > self._interval_s:
            if len(self._known) >= KINDS_MAX:
                self._known.clear()
            self._known[kind] = _Fault(now, now)
            return min(logging.INFO, lasting)
        fault.last = now
        if now - fault.first < LASTS_S or (fault.warned is not None and now - fault.warned < self._interval_s):
            return None
        fault.warned = now
        return lasting


class Throttled:
    """Logs faults of Kafka as often and as loud as :class:`Faults` says. For one thread."""

    def __init__(self, logger: logging.Logger, interval_s: float = 60.0) -> None:
        self._logger = logger
        self._faults = Faults(interval_s)

    def warning(self, kind: Hashable, message: str, *args: object) -> None:
        """Logs ``message % args``: the first of this ``kind`` as information."""
        level = self._faults.level(kind)
        if level is not None:
            self._logger.log(level, message, *args)


class NotRepeated(logging.Filter):
    """The same for the logger of librdkafka, which tries again and again, and says so each time.

    Numbers in a record's text make no difference. Only what a broker that starts or restarts causes is information at
    first; anything else comes at its own level, once in ``interval_s`` seconds.
    """

    _PASSING = ("FAIL ", "GETPID ", "REQTMOUT ")
    """How librdkafka names a lost or refused connection, a coordinator that loads, and an answer that came late."""

    def __init__(self, interval_s: float = 60.0) -> None:
        super().__init__()
        self._interval_s = interval_s
        self._faults = Faults(interval_s)
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged; its level may be lowered."""
        text = record.getMessage()
        kind = re.sub(r"\d+", "0", text)
        if text.startswith(self._PASSING):
            level = self._faults.level(kind, record.levelno)
            if level is None or not logging.getLogger(record.name).isEnabledFor(level):
                return False
            record.levelno, record.levelname = level, logging.getLevelName(level)
            return True
        now = time.monotonic()
        if now - self._last.get(kind, float("-inf")) < self._interval_s:
            return False
        if len(self._last) >= KINDS_MAX:
            self._last.clear()
        self._last[kind] = now
        return True
