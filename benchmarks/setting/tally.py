"""Counts the bodies that ran, in shared memory: 0.3 µs a body, the same for every system.

Each process that runs bodies adds up in a slot of its own; a reader sums the slots. Times are ns of the machine's
monotonic clock, which all its processes share.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
from pathlib import Path

SLOTS, WORDS = 256, 4
_COUNT, _STARTED, _ENDED, _DELAY = range(WORDS)
_BYTES = 8 * WORDS * (SLOTS + 1)
"""The first slot is the header: how many slots are taken, and the flag."""


class Tally:
    """The counts behind ``path``; made on first use. For any number of processes and threads, forked ones too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("a+b") as file:
            file.truncate(_BYTES)
            self._words = memoryview(mmap.mmap(file.fileno(), _BYTES)).cast("q")
        self._lock = threading.Lock()
        self._pid = 0
        self._slot = 0

    def ran(self, sent_ns: int | None = None, started_ns: int | None = None) -> None:
        """A body ends now.

        :param sent_ns: when its call began: tells :attr:`delay_ns`. :param started_ns: when it began; none: just now.
        """
        now = time.monotonic_ns()
        with self._lock:
            base = self._own()
            self._words[base + _STARTED] = now if started_ns is None else started_ns
            self._words[base + _ENDED] = now
            self._words[base + _DELAY] = 0 if sent_ns is None else (started_ns or now) - sent_ns
            self._words[base + _COUNT] += 1

    def began(self) -> int:
        """A body begins now; returns when."""
        now = time.monotonic_ns()
        with self._lock:
            self._words[self._own() + _STARTED] = now
        return now

    @property
    def count(self) -> int:
        """Bodies that ended."""
        return sum(self._column(_COUNT))

    @property
    def started_ns(self) -> int:
        """When the body that began last began."""
        return max(self._column(_STARTED))

    @property
    def ended_ns(self) -> int:
        """When the body that ended last ended."""
        return max(self._column(_ENDED))

    @property
    def delay_ns(self) -> int:
        """How long after its call the body that ended last had begun."""
        ended = self._column(_ENDED)
        return self._column(_DELAY)[ended.index(max(ended))]

    @property
    def flag(self) -> int:
        """A number that a reader of the tally tells the bodies."""
        return self._words[1]

    @flag.setter
    def flag(self, value: int) -> None:
        self._words[1] = value

    def _own(self) -> int:
        if self._pid != os.getpid():
            with self._path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                self._words[0] += 1
                self._slot = self._words[0]
            if self._slot > SLOTS:
                raise RuntimeError(f"more than {SLOTS} processes run bodies")
            self._pid = os.getpid()
        return self._slot * WORDS

    def _column(self, word: int) -> list[int]:
        return self._words[WORDS + word :: WORDS].tolist()
