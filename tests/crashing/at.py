"""Runs a command whose process kills itself at a crash point: ``python -m tests.crashing.at POINT[:NTH] -- COMMAND …``.

For example ``python -m tests.crashing.at worker.succeed.before_commit:3 -- celery -A app worker``. The command's
children obey too, and together they count to NTH. ``python -m tests.crashing.at --list`` names the points.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from celery_durable.crashpoints import POINTS
from tests.crashing.orders import Orders


def main(arguments: list[str]) -> int:
    """Becomes the command; returns an exit code only if it cannot."""
    if arguments == ["--list"]:
        print("\n".join(POINTS))
        return 0
    if len(arguments) < 3 or arguments[1] != "--":
        print(__doc__, file=sys.stderr)
        return 2
    orders = Orders(Path(tempfile.mkdtemp(prefix="crash-")))
    try:
        orders.give(arguments[0])
    except ValueError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    command = arguments[2:]
    try:
        os.execvpe(command[0], command, {**os.environ, **orders.env})
    except OSError as error:
        print(f"Error: {command[0]}: {error.strerror}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
