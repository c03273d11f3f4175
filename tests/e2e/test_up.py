"""``celery -A tasks durable up`` as a new user meets it: the README's first task, literally."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.harness import REPOSITORY, wait_until

pytestmark = pytest.mark.processes

READY = ("dispatcher of tasks: started", "ready.", "in service")


def first_task() -> str:
    """The README's ``tasks.py``."""
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    [block] = [block for block in blocks if block.startswith("# tasks.py\n")]
    return str(block)


class Up:
    """A running ``durable up``."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        """All that it wrote."""
        return self._log.read_text()

    def family(self) -> list[psutil.Process]:
        """Its processes, itself included."""
        process = psutil.Process(self.process.pid)
        return [process, *process.children(recursive=True)]

    def child(self, *words: str) -> psutil.Process:
        """The direct child whose command line has all the words."""
        children = psutil.Process(self.process.pid).children()
        [found] = [child for child in children if all(word in child.cmdline() for word in words)]
        return found


def gone(processes: list[psutil.Process]) -> bool:
    """Whether none of them runs any more (one that nobody has reaped does not run)."""
    for process in processes:
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            continue
    return True


@contextmanager
def up(folder: Path) -> Iterator[Up]:
    """Starts it in ``folder``, where ``tasks.py`` is, and waits until all parts work."""
    (folder / "tasks.py").write_text(first_task())
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("CELERY_", "HOLDER_"))}
    log = folder / "up.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "tasks", "durable", "up"],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    running = Up(process, log)
    family: list[psutil.Process] = []
    try:
        wait_until(
            lambda: process.poll() is not None or all(text in running.log for text in READY), 90, what="all parts up"
        )
        assert process.poll() is None, running.log
        family = running.family()
        yield running
    finally:
        process.kill()
        process.wait()
        wait_until(lambda: gone(family), 20, what="no process left")


def test_first_task_of_the_readme(tmp_path: Path) -> None:
    """The file works as it is; a killed worker is restarted; SIGTERM ends all of it with exit code 0."""
    with up(tmp_path) as running:
        calls = [sys.executable, "tasks.py"]
        done = subprocess.run(calls, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, done.stderr + running.log
        assert len(done.stdout.splitlines()) == 10
        worker = running.child("worker")
        worker.kill()
        wait_until(lambda: running.log.count("ready.") == 2, 60, what="the worker's restart")
        assert "ended (signal SIGKILL); starts again in 0.5 s" in running.log
        family = running.family()
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(40) == 0
        assert gone(family)
    assert not list((tmp_path / ".durable" / "broker" / "partial").iterdir())


def test_sigkill_leaves_no_orphan(tmp_path: Path) -> None:
    with up(tmp_path) as running:
        family = running.family()
        assert len(family) >= 5  # itself, leash, holder, dispatcher, worker
        running.process.kill()
        running.process.wait()
        wait_until(lambda: gone(family), 20, what="every process ended")


def test_a_configuration_error_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(
        "from celery import Celery\napp = Celery('tasks')\napp.conf.durable = {'heartbeat_timeout_s': -1}\n"
    )
    command = [sys.executable, "-m", "celery", "-A", "tasks", "durable", "up"]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "heartbeat_timeout_s = -1" in done.stderr
