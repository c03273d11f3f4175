"""``make chaos [MINUTES=] [SEED=] [BROKER=]``: one run, one summary; exit code 0 only if nothing was violated."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from tempfile import mkdtemp

from rich.console import Console

from tests.chaos.run import PROTOCOLS, run
from tests.chaos.summary import show
from tests.services import ServiceUnavailable


def main() -> int:
    """Reads the command line and runs."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long faults are made")
    parser.add_argument("--seed", type=int, default=None, help="of the faults and the load; default: a new one")
    parser.add_argument("--broker", choices=("redis", "rabbitmq"), default="redis", help="Celery's broker")
    parser.add_argument(
        "--protocol", choices=PROTOCOLS, default=None, help="Kafka group protocol; default: by the seed"
    )
    parser.add_argument("--folder", type=Path, default=None, help="for history and logs; default: a new one")
    words = parser.parse_args()
    seed = random.SystemRandom().randrange(1_000_000) if words.seed is None else words.seed
    folder = words.folder or Path(mkdtemp(prefix="celery-durable-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    console.print(f"seed {seed}, history and logs in {folder}")
    try:
        outcome = run(
            folder,
            seed=seed,
            seconds=words.minutes * 60,
            broker=words.broker,
            protocol=words.protocol,
            say=lambda text: console.print(text, markup=False),
        )
    except ServiceUnavailable as error:
        console.print(f"not run: {error}", markup=False)
        return 2
    show(console, outcome)
    if outcome.good:
        return 0
    console.print(f"again: {outcome.command}", markup=False)
    return 1


if __name__ == "__main__":
    sys.exit(main())
