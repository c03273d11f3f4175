"""``python -m examples.api_calls``: runs the demo; ``--help`` says what can be chosen."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from examples.api_calls.demo import Demo
from examples.api_calls.jobs import load

PIPE_WIDTH = 110


def main() -> int:
    """Runs the demo and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.api_calls", description=__doc__)
    parser.add_argument("--jobs", type=int, default=None, help="make only the first so many calls (default: all)")
    parser.add_argument("--seconds", type=float, default=120, help="fail if it takes longer (default: %(default)s)")
    parser.add_argument("--no-faults", action="store_true", help="kill no worker and restart no holder")
    options = parser.parse_args()
    jobs = load(options.jobs)
    if not jobs:
        parser.error(f"--jobs {options.jobs}: at least one call")
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_WIDTH)
    try:
        return Demo(jobs, console, limit_s=options.seconds, faults=not options.no_faults).run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
