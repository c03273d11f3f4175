"""The command that runs another until it kills itself at a crash point."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from celery_durable.crashpoints import POINTS
from tests.harness import REPOSITORY

pytestmark = pytest.mark.processes

_THREE = (
    "from celery_durable.crashpoints import crashpoint; " + 3 * "print(crashpoint('passes.step', 'after_commit')); "
)
_FORKED = f"import os; pid = os.fork(); exec({_THREE!r}) if not pid else print(os.waitpid(pid, 0)[1])"


def at(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m tests.crashing.at WORDS``."""
    return subprocess.run(
        [sys.executable, "-m", "tests.crashing.at", *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_command_dies_at_its_nth_passing() -> None:
    """It is run, not imported, so it may be any program."""
    done = at("passes.step.after_commit:3", "--", sys.executable, "-uc", _THREE)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == "None\n" * 2


def test_a_command_that_does_not_pass_it_ends_as_ever() -> None:
    """Nothing is printed, and the exit code is the command's."""
    done = at("passes.step.after_commit:4", "--", sys.executable, "-c", f"{_THREE}import sys; sys.exit(7)")
    assert (done.returncode, done.stdout, done.stderr) == (7, "None\n" * 3, "")


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_children_obey_too(start: str) -> None:
    """However they are started; their parent lives on."""
    code = _FORKED
    if start == "exec":
        code = f"import subprocess, sys; print(-subprocess.call([sys.executable, '-c', {_THREE!r}]))"
    done = at("passes.step.after_commit", "--", sys.executable, "-c", code)
    assert (done.returncode, done.stdout.split()[-1]) == (0, str(int(signal.SIGKILL))), done.stderr


def test_what_it_refuses() -> None:
    """A name that is none, and a command that is none, in one line; no command at all, with its help."""
    for words in (["passes.stop.after_commit", "--", "true"], ["passes.step.after_commit", "--", "no-such-command"]):
        done = at(*words)
        assert done.returncode == 2
        assert done.stderr.startswith("Error: "), done.stderr
        assert done.stderr.count("\n") == 1
    assert at("passes.step.after_commit").returncode == 2
    assert at("--list").stdout.split() == list(POINTS)
