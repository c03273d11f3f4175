"""Procrastinate on PostgreSQL, running."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.setting.child import call, command
from benchmarks.setting.servers import Servers
from benchmarks.setting.tally import Tally
from benchmarks.systems.sql_queue import SqlQueue
from tests.harness import Process

SETTINGS = (
    "2 worker processes with 10 concurrent coroutine tasks each, PostgreSQL with LISTEN/NOTIFY, "
    "defer by the synchronous connector"
)


class Procrastinate(SqlQueue):
    """Procrastinate's workers."""

    SENDER = "benchmarks.systems.procrastinate_app:send"
    ENDED = "SELECT count(*) FROM procrastinate_jobs WHERE status = 'succeeded'"


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
