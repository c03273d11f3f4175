"""A loop that does one kind of work in one thread: fast while there is work, slowly when idle (case F5)."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

logger = logging.getLogger(__name__)

ERROR_PAUSE_MIN_S = 0.1
"""First pause after an error: long enough to be told in a log line, short beside what people notice."""
SWITCH_S = 0.0005
"""How long a thread computes before another one may: a tenth of CPython's own."""
_turns = threading.Lock()
_inside, _before_s = 0, 0.0
"""How many are inside :func:`quick_turns`, and what was set before the first of them."""

Step = Callable[[], float | None]
"""Does a piece of work. Returns None if there may be more at once, or the seconds until there may be more
(``float('inf')``: nothing known). It raises to have the loop back off and try again."""


class Loop:
    """Calls ``step`` in a thread of its own until :meth:`stop`.

    A step that did work is called again at once. An idle one is called again after a pause that doubles from
    ``pause_min_s`` to ``pause_max_s``, sooner if the step named a sooner time or :meth:`wake` was called. An error is
    logged and backs off, doubling from 0.1 s to ``error_pause_max_s``, so that a failing part neither ends the loop nor
    spins.

    :param on_end: called in the loop's thread when it ends: to close what belongs to the thread.
    """

    def __init__(
        self,
        name: str,
        step: Step,
        *,
        pause_min_s: float,
        pause_max_s: float,
        error_pause_max_s: float = 5.0,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self._step = step
        self._pause_min_s = pause_min_s
        self._pause_max_s = pause_max_s
        self._error_pause_max_s = error_pause_max_s
        self._on_end = on_end
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def stopping(self) -> bool:
        """True once :meth:`stop` was called: a long step should end early."""
        return self._stopping.is_set()

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Ends the present pause. A hint: nothing is lost without it."""
        self._wake.set()

    def stop(self) -> None:
        """Asks the loop to end after the present step."""
        self._stopping.set()
        self._wake.set()

    def join(self, timeout_s: float) -> bool:
        """Waits for the end; False if the loop still runs."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._step_until_stopped()
        finally:
            if self._on_end is not None:
                self._on_end()

    def _step_until_stopped(self) -> None:
        idle_s, error_s = self._pause_min_s, ERROR_PAUSE_MIN_S
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                due_s = self._step()
            except (Exception, SystemExit) as error:  # noqa: BLE001 - nor may users' code that a step calls end its thread
                logger.warning("%s: %s: %s; again in %.1f s", self.name, type(error).__name__, error, error_s)
                self._stopping.wait(error_s)
                error_s = min(self._error_pause_max_s, error_s * 2)
                continue
            error_s = ERROR_PAUSE_MIN_S
            if due_s is None:
                idle_s = self._pause_min_s
                continue
            if self._wake.wait(max(0.0, min(idle_s, due_s))):
                idle_s = self._pause_min_s
            else:
                idle_s = min(self._pause_max_s, idle_s * 2)


@contextmanager
def quick_turns() -> Iterator[None]:
    """While this lasts, a thread of this process that computes lets another one in after :data:`SWITCH_S`.

    With CPython's own 5 ms a message that arrives waits for as long, behind whichever loop is at work. Several threads
    may be inside: the last one that leaves restores what was set before.
    """
    global _inside, _before_s  # noqa: PLW0603 - the interpreter's setting is the process's
    with _turns:
        _inside += 1
        if _inside == 1:
            _before_s = sys.getswitchinterval()
            sys.setswitchinterval(min(_before_s, SWITCH_S))
    try:
        yield
    finally:
        with _turns:
            _inside -= 1
            if not _inside:
                sys.setswitchinterval(_before_s)


def stop_all(loops: Sequence[Loop], timeout_s: float) -> list[str]:
    """Stops the loops together and waits at most ``timeout_s`` seconds. Returns the names of those that still run."""
    deadline = time.monotonic() + timeout_s
    for loop in loops:
        loop.stop()
    return [loop.name for loop in loops if not loop.join(max(0.0, deadline - time.monotonic()))]
