"""Child processes of ``up`` and of the demo: labelled, restarted, and never orphaned."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from celery_durable.supervisor import Supervisor

pytestmark = pytest.mark.processes

DEADLINE_S = 20.0
SLEEPER = [sys.executable, "-c", "import time; print('ready'); time.sleep(600)"]


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.02)


class Lines(list[tuple[str, str]]):
    def write(self, name: str, line: str) -> None:
        self.append((name, line))


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def supervisor(lines: Lines) -> Iterator[Supervisor]:
    with Supervisor(lines.write, restart_min_s=0.05) as supervisor:
        yield supervisor


def test_lines_carry_the_name_of_their_child(supervisor: Supervisor, lines: Lines) -> None:
    code = "import os, sys; print(os.environ['WHO']); print('to stderr', file=sys.stderr)"
    assert supervisor.run([sys.executable, "-c", code], {"WHO": "a worker"}, name="worker") == 0
    assert sorted(lines) == [("worker", "a worker"), ("worker", "to stderr")]


def test_a_killed_child_is_reported_and_starts_again(supervisor: Supervisor, lines: Lines) -> None:
    supervisor.start("sleeper", SLEEPER)
    first = supervisor.pid("sleeper")
    until(lambda: ("sleeper", "ready") in lines, "started")
    supervisor.kill("sleeper")
    until(lambda: supervisor.check() is None and supervisor.alive("sleeper"), "restarted")
    assert supervisor.pid("sleeper") != first
    assert any("signal SIGKILL" in line for _, line in lines)


def test_a_configuration_error_ends_all_since_it_would_come_again(supervisor: Supervisor) -> None:
    supervisor.start("worker", [sys.executable, "-c", "raise SystemExit(2)"])
    until(lambda: supervisor.check() == 2, "all ended with the child's exit code")


def test_restarts_back_off(supervisor: Supervisor, lines: Lines) -> None:
    supervisor.start("worker", [sys.executable, "-S", "-c", "raise SystemExit(1)"])
    until(lambda: supervisor.check() is None and len(lines) >= 3, "ended three times")
    assert [line.rpartition("in ")[2] for _, line in lines[:3]] == ["0.05 s", "0.1 s", "0.2 s"]


def test_stop_kills_what_ignores_sigterm(lines: Lines) -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(600)"
    supervisor = Supervisor(lines.write)
    supervisor.start("stubborn", [sys.executable, "-c", stubborn])
    pid = supervisor.pid("stubborn")
    until(lambda: ("stubborn", "ready") in lines, "started")
    supervisor.stop(timeout_s=0.3)
    assert not psutil.pid_exists(pid)
    assert ("stubborn", "did not end in time: killed") in lines


PARENT = """
import subprocess, sys, time
from celery_durable.supervisor import Supervisor

grandchild = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {grandchild!r}]); print(p.pid); p.wait()"
supervisor = Supervisor(lambda name, line: print(line, flush=True))
supervisor.start("child", [sys.executable, "-u", "-c", child])
print(supervisor.pid("child"), flush=True)
time.sleep(600)
"""


def test_sigkill_of_the_parent_leaves_no_orphan(tmp_path: Path) -> None:
    """A child and a grandchild that ignores SIGTERM (a worker's pool) end after their parent was killed."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=tmp_path)
    try:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        assert all(psutil.pid_exists(pid) for pid in pids)
        os.kill(parent.pid, signal.SIGKILL)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()

    def gone(pid: int) -> bool:
        try:
            return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True

    until(lambda: all(gone(pid) for pid in pids), "child and grandchild ended")
