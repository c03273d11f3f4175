"""Server processes that leave nothing behind: they end with the process that started them, however it ends."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")

# Below the range that the kernel hands to outgoing connections: nothing takes a free port before its server does.
_PORTS = range(15_000, 20_000)
_handed_out: set[int] = set()


class ServiceUnavailable(Exception):
    """This machine cannot run the service; the message says why and what to install."""


class NotReady(Exception):
    """A server did not answer, or ended, before its deadline."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on, and that this process has not handed out before."""
    for port in random.sample(_PORTS, len(_PORTS)):
        if port in _handed_out:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _handed_out.add(port)
        return port
    raise RuntimeError(f"no free port in {_PORTS}")


def poll_until(check: Callable[[], T | None], deadline_s: float, *, what: str, every_s: float = 0.02) -> T:
    """Calls ``check`` until it returns something true, and returns that; :class:`NotReady` after the deadline."""
    deadline = time.monotonic() + deadline_s
    while True:
        found = check()
        if found:
            return found
        if time.monotonic() > deadline:
            raise NotReady(f"{what}: not within {deadline_s:g} s")
        time.sleep(every_s)


def accepts_connections(port: int) -> bool:
    """True if something listens on the port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


class ServerProcess:
    """A process in a session of its own, with its output in a file.

    The kernel kills it when the process (on Linux: the thread) that started it ends, even by SIGKILL.

    :param user: run as this user, if the caller is root.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        user: str | None = None,
    ) -> None:
        self.command = [*guarded(user), *command]
        self.log = log
        self._env = None if env is None else {**os.environ, **env}
        self._cwd = cwd
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process's ID."""
        if self._process is None:
            raise RuntimeError(f"{self.command[0]} was not started")
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while it runs or before it was started."""
        return None if self._process is None else self._process.poll()

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Starts the process. Its output is appended to the log."""
        if self.alive:
            raise RuntimeError(f"{self.command[0]} runs already")
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._env,
                cwd=self._cwd,
                start_new_session=True,
            )
        return self

    def send(self, number: signal.Signals) -> None:
        """Sends the signal to the process itself, not to its children."""
        if self.alive:
            os.kill(self.pid, number)

    def send_all(self, number: signal.Signals) -> None:
        """Sends the signal to the process and its children."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def wait(self, timeout_s: float) -> int:
        """Waits for the end and returns the exit code. Raises :class:`NotReady` after the timeout."""
        if self._process is None:
            raise RuntimeError(f"{self.command[0]} was not started")
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise NotReady(f"not within {timeout_s:g} s: the end of {self.command[0]}") from None

    def kill(self) -> None:
        """Kills the process and its children with SIGKILL, as a power cut would."""
        if self._process is not None:
            self.send_all(signal.SIGKILL)
            self.wait(10)

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = 10) -> None:
        """Ends the process with the signal; with SIGKILL if it is still there after the timeout."""
        if self.alive:
            self.send(signal.SIGCONT)
            self.send(number)
            with contextlib.suppress(NotReady):
                self.wait(timeout_s)
        self.kill()

    def until(self, ready: Callable[[], T | None], deadline_s: float) -> T:
        """Waits until ``ready`` returns something true. If the process ends before, or is late, shows its log."""

        def check() -> T | None:
            if not self.alive:
                raise NotReady(f"{self.command[0]} ended with {self.returncode}")
            return ready()

        try:
            return poll_until(check, deadline_s, what=self.command[0])
        except NotReady as error:
            raise NotReady(f"{error}; its log ends:\n{self.log_tail()}") from None

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of the log."""
        if not self.log.exists():
            return "(nothing)"
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def __enter__(self) -> Self:
        return self if self.alive else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def guarded(user: str | None) -> list[str]:
    """What to put before a command so that it runs as ``user`` and ends with its parent.

    :raises ServiceUnavailable: root cannot become ``user`` here.
    """
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        if user is not None and os.geteuid() == 0:
            raise ServiceUnavailable(f"as root the server must run as {user}: install setpriv (util-linux)")
        return []
    switch = []
    if user is not None and os.geteuid() == 0:
        switch = [f"--reuid={user}", f"--regid={user}", "--init-groups"]
    return [setpriv, *switch, "--pdeathsig", "KILL", "--"]
