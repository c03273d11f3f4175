"""Child processes of one terminal command: labelled output, restarts with backoff, and no orphan in any case.

Each child leads a process group of its own, so that Ctrl-C in the terminal reaches the parent alone and a kill reaches
a worker's pool too. A child starts to work only after the leash (:mod:`celery_durable.leash`) knows of it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from celery_durable.leash import signal_group

CONFIGURATION_ERROR = 2
"""Exit code of a child that will fail in the same way again: it is not restarted."""
RESTART_MIN_S = 0.5
RESTART_MAX_S = 10.0
STEADY_S = 30.0
"""A child that lived this long starts with the shortest backoff again."""

# Waits for a line that comes once the leash holds its group; if the parent died before, it reads the end and exits.
_GATE = ["/bin/sh", "-c", 'read -r _ && exec "$@" </dev/null', "sh"]

Output = Callable[[str, str], None]
"""Called with a child's name and one line that it wrote, or that is said about it."""


@dataclass
class _Child:
    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    process: subprocess.Popen[bytes]
    reader: threading.Thread
    started_at: float
    backoff_s: float
    restart_at: float | None = None


class Supervisor:
    """Starts children and keeps them running. Use it as a context: leaving it ends every child.

    Not thread-safe: one thread calls it. ``output`` is called from one thread a child.
    """

    def __init__(self, output: Output, *, restart_min_s: float = RESTART_MIN_S) -> None:
        self._output = output
        self._restart_min_s = restart_min_s
        self._children: dict[str, _Child] = {}
        self._leash = subprocess.Popen(
            [sys.executable, "-m", "celery_durable.leash"], stdin=subprocess.PIPE, process_group=0
        )

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Starts a child under ``name``; ``env`` is added to this process's environment."""
        self._children[name] = self._launch(name, command, env or {})

    def run(self, command: Sequence[str], env: Mapping[str, str] | None = None, *, name: str) -> int:
        """Runs a command to its end and returns its exit code."""
        child = self._launch(name, command, env or {})
        try:
            code = child.process.wait()
        finally:
            self._bury(child)
        return code

    def pid(self, name: str) -> int:
        """The process ID of the child, which is also that of its process group."""
        return self._children[name].process.pid

    def alive(self, name: str) -> bool:
        """True while the child's process runs; False between its end and its restart."""
        return self._children[name].process.poll() is None

    def kill(self, name: str) -> None:
        """SIGKILL to the child's whole process group. :meth:`check` restarts it as after any other end."""
        signal_group(self.pid(name), signal.SIGKILL)
        self._children[name].process.wait()

    def terminate(self, name: str) -> None:
        """SIGTERM to the child. :meth:`check` restarts it once it has ended."""
        self._children[name].process.send_signal(signal.SIGTERM)

    def check(self) -> int | None:
        """Restarts what ended and is due. Returns an exit code if the whole must end, None to go on.

        Call it a few times a second.
        """
        now = time.monotonic()
        for child in list(self._children.values()):
            code = child.process.poll()
            if code is None:
                continue
            if child.restart_at is None:
                self._bury(child)
                if code == CONFIGURATION_ERROR:
                    self._output(child.name, "ended with a configuration error, so all ends")
                    return CONFIGURATION_ERROR
                if now - child.started_at >= STEADY_S:
                    child.backoff_s = self._restart_min_s
                child.restart_at = now + child.backoff_s
                self._output(child.name, f"ended ({_reason(code)}); starts again in {child.backoff_s:g} s")
            elif now >= child.restart_at:
                successor = self._launch(child.name, child.command, child.env)
                successor.backoff_s = min(RESTART_MAX_S, child.backoff_s * 2)
                self._children[child.name] = successor
        return None

    def stop(self, timeout_s: float = 10.0, cut_short: Callable[[], bool] = lambda: False) -> None:
        """Ends all children: SIGTERM, and SIGKILL for what runs after ``timeout_s`` or once ``cut_short()`` is true."""
        children = [child for child in self._children.values() if child.restart_at is None]
        for child in children:
            child.process.terminate()
        deadline = time.monotonic() + timeout_s
        while any(child.process.poll() is None for child in children):
            if time.monotonic() >= deadline or cut_short():
                for child in children:
                    if child.process.poll() is None:
                        self._output(child.name, "did not end in time: killed")
                break
            time.sleep(0.05)
        for child in children:
            self._bury(child)
        self._children.clear()
        if self._leash.stdin is not None and not self._leash.stdin.closed:
            self._leash.stdin.close()
        self._leash.wait()

    def _launch(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> _Child:
        process = subprocess.Popen(  # noqa: S603 - commands of this package, no shell reads them
            [*_GATE, *command],
            env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        self._tell_leash("+", process.pid)
        assert process.stdin is not None  # noqa: S101 - PIPE was asked for
        process.stdin.write(b"\n")
        process.stdin.close()
        reader = threading.Thread(target=self._read, args=(name, process), name=f"output of {name}", daemon=True)
        reader.start()
        return _Child(name, command, env, process, reader, time.monotonic(), self._restart_min_s)

    def _read(self, name: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None  # noqa: S101 - PIPE was asked for
        with process.stdout:
            for line in process.stdout:
                text = line.decode(errors="replace").rstrip()
                if text:
                    self._output(name, text)

    def _bury(self, child: _Child) -> None:
        # A dead worker's pool may go on for a while: nothing of the group may outlive its leader.
        signal_group(child.process.pid, signal.SIGKILL)
        child.process.wait()
        child.reader.join(timeout=1.0)
        self._tell_leash("-", child.process.pid)

    def _tell_leash(self, sign: str, group: int) -> None:
        assert self._leash.stdin is not None  # noqa: S101 - PIPE was asked for
        if not self._leash.stdin.closed:
            self._leash.stdin.write(f"{sign}{group}\n".encode())
            self._leash.stdin.flush()


def _reason(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
