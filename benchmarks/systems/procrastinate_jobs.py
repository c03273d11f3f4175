"""Procrastinate on PostgreSQL, running."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psycopg

from benchmarks.setting.child import Child, call, command
from benchmarks.setting.running import Running
from benchmarks.setting.servers import Servers
from benchmarks.setting.tally import Tally
from tests.harness import Process

SETTINGS = (
    "2 worker processes with 10 concurrent coroutine tasks each, PostgreSQL with LISTEN/NOTIFY, "
    "defer by the synchronous connector"
)


class Procrastinate(Running):
    """Some worker processes on one queue."""

    def __init__(self, url: str, tally: Tally, processes: Sequence[Process], accounts: int) -> None:
        super().__init__([tally], processes)
        self._url = url
        self._accounts = accounts
        self._connection = psycopg.connect(url, autocommit=True)

    def send(self, count: int) -> list[Child]:
        return [Child("benchmarks.systems.procrastinate_app:send", url=self._url, count=count, accounts=self._accounts)]

    def ended(self) -> int:
        query = "SELECT count(*) FROM procrastinate_jobs WHERE status = 'succeeded'"
        row = self._connection.execute(query).fetchone()
        return 0 if row is None else int(row[0])

    def close(self) -> None:
        """Ends its connection."""
        self._connection.close()


@contextlib.contextmanager
def running(
    servers: Servers, *, processes: int = 2, concurrency: int = 10, accounts: int = 0
) -> Iterator[Procrastinate]:
    """Worker processes on a database of their own."""
    module = "benchmarks.systems.procrastinate_app"
    with servers.new_database() as url, tempfile.TemporaryDirectory(prefix="celery-durable-bench-") as name:
        folder, plain = Path(name), url.replace("+psycopg", "")
        call(f"{module}:migrate", url=plain)
        tally = folder / "tally"
        with contextlib.ExitStack() as handles:
            words = command(f"{module}:serve", url=plain, tally=str(tally), concurrency=concurrency)
            started = [
                handles.enter_context(Process(f"procrastinate{number}", words, folder=folder, env={}))
                for number in range(processes)
            ]
            system = Procrastinate(plain, Tally(tally), started, accounts)
            handles.callback(system.close)
            yield system
