"""Procrastinate: its task, worker and sender."""

from __future__ import annotations

from pathlib import Path

from benchmarks.setting.tally import Tally
from benchmarks.systems.sending import account, timed

TASK = "bench.noop"


def serve(url: str, tally: str, concurrency: int) -> None:
    """A worker process, until it is killed. Its task is a coroutine function: those may run concurrently."""
    import procrastinate

    counter = Tally(Path(tally))
    # One connection for each job at once, one that fetches, one that listens.
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url, max_size=concurrency + 2))

    @app.task(name=TASK)
    async def noop(number: int) -> None:
        counter.ran()

    while True:
        try:
            app.run_worker(concurrency=concurrency)
            return
        except procrastinate.exceptions.UniqueViolation as error:
            # Two workers took jobs of one lock at once, and its index refused the second. Whoever keeps workers up
            # starts it again, and so does this.
            print(f"the worker ended, and is started again: {error.constraint_name}", flush=True)


def migrate(url: str) -> None:
    """Makes its tables."""
    import procrastinate

    with procrastinate.App(connector=procrastinate.SyncPsycopgConnector(conninfo=url)).open() as app:
        app.schema_manager.apply_schema()


def send(url: str, count: int, accounts: int = 0) -> dict[str, int]:
    """``defer`` in a loop; with accounts, each under the account's lock."""
    import procrastinate

    app = procrastinate.App(connector=procrastinate.SyncPsycopgConnector(conninfo=url))
    with app.open():
        if not accounts:
            deferrer = app.configure_task(TASK)
            return timed(lambda number: deferrer.defer(number=number), count)
        return timed(
            lambda number: app.configure_task(TASK, lock=account(number, accounts)).defer(number=number), count
        )
