"""Functions of the benchmarks in processes of their own, so that no contender carries another one's modules or threads.

``python -m benchmarks.setting.child module:function JSON`` calls the function with the JSON's fields and prints what it
returns as JSON, on the last line. With ``--gated`` the function's :func:`gate` waits for :func:`start_together`.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from tests.harness import REPOSITORY

TIMEOUT_S = 600.0
_GATED, _AT_GATE = "--gated", "at the gate\n"


class Failed(Exception):
    """A measurement that did not come to its end: the run fails."""


def command(function: str, **fields: Any) -> list[str]:
    """The command that calls ``module:function``."""
    return [sys.executable, "-m", __name__, function, json.dumps(fields)]


class Child:
    """A call under way in a process of its own.

    :param gated: it goes on beyond its :func:`gate` when :meth:`go` is called.
    """

    def __init__(self, function: str, *, gated: bool = False, **fields: Any) -> None:
        self._function = function
        self._process = subprocess.Popen(
            [*command(function, **fields), *([_GATED] if gated else [])],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def until_at_gate(self) -> None:
        """Waits until it has come to its gate.

        :raises Failed: it failed, or is late.
        """
        output = self._process.stdout
        if output is None or not select.select([output], [], [], TIMEOUT_S)[0]:
            self.kill()
            raise Failed(f"{self._function}: not within {TIMEOUT_S:g} s at its gate")
        line = output.readline()
        if line != _AT_GATE:
            self.result()
            raise Failed(f"{self._function}: it has no gate")

    def go(self) -> None:
        """Opens the gate."""
        if self._process.stdin is not None:
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def check(self) -> None:
        """:raises Failed: it ended with an error."""
        if self._process.poll():
            self.result()

    def result(self, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """Waits for the end and returns what the function returned.

        :raises Failed: it failed, or is late.
        """
        try:
            output, errors = self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Failed(f"{self._function}: not within {timeout_s:g} s") from None
        if self._process.returncode != 0:
            raise Failed(f"{self._function} ended with {self._process.returncode}:\n{errors[-4_000:]}")
        answer: dict[str, Any] = json.loads(output.splitlines()[-1])
        return answer

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()
        self._process.communicate()


def start_together(children: Sequence[Child]) -> list[Child]:
    """Opens the gates of gated children when all have come to theirs. Returns them."""
    try:
        for child in children:
            child.until_at_gate()
        for child in children:
            child.go()
    except BaseException:
        for child in children:
            child.kill()
        raise
    return list(children)


def gate() -> None:
    """The child's side: waits for the others, if it was started gated."""
    if _GATED in sys.argv:
        print(_AT_GATE, end="", flush=True)
        if not sys.stdin.readline():
            raise SystemExit("nobody has opened the gate")


def call(function: str, **fields: Any) -> dict[str, Any]:
    """Calls ``module:function`` in a process of its own and returns what it returned."""
    return Child(function, **fields).result()


def main() -> None:
    """The child's side."""
    module, _, name = sys.argv[1].partition(":")
    answer = getattr(import_module(module), name)(**json.loads(sys.argv[2]))
    print(json.dumps(answer or {}), flush=True)


if __name__ == "__main__":
    main()
