"""DBOS with a queue on PostgreSQL, running."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.setting.child import command
from benchmarks.setting.servers import Servers
from benchmarks.setting.tally import Tally
from benchmarks.systems.sql_queue import SqlQueue
from tests.harness import Process

POLLING_S = 0.2
"""Of 0.2, 0.05 and 0.01 s the fastest for both kinds of queue on two cores: more polls cost more than they win."""
UNLIMITED: dict[str, Any] = {"polling_interval_sec": POLLING_S}


def limited(limit: int) -> dict[str, Any]:
    """A partitioned queue that runs so many workflows of a partition at once, and starts no more in a poll."""
    return {"partition_concurrency": limit, "polling_interval_sec": POLLING_S}


def describe(queue: dict[str, Any]) -> str:
    """The set-up in words."""
    return f"2 worker processes, PostgreSQL, queue {queue}, DBOSClient.enqueue"


class Dbos(SqlQueue):
    """DBOS's workers."""

    SENDER = "benchmarks.systems.dbos_app:send"
    ENDED = "SELECT count(*) FROM dbos.workflow_status WHERE status = 'SUCCESS'"

    def ready(self) -> bool:
        """Whether the queue is registered."""
        try:
            row = self._connection.execute("SELECT count(*) FROM dbos.queues").fetchone()
        except psycopg.errors.UndefinedTable:
            return False
        return bool(row and row[0])


@contextlib.contextmanager
def running(servers: Servers, *, queue: dict[str, Any], processes: int = 2, accounts: int = 0) -> Iterator[Dbos]:
    """Worker processes on a database of their own.

    :param queue: parameters of ``DBOS.register_queue``.
    """
    with servers.new_database() as url, tempfile.TemporaryDirectory(prefix="celery-durable-bench-") as name:
        folder, plain = Path(name), url.replace("+psycopg", "")
        tally = folder / "tally"
        with contextlib.ExitStack() as handles:
            serve = partial(command, "benchmarks.systems.dbos_app:serve", url=plain, tally=str(tally), queue=queue)
            started = [
                Process(f"dbos{number}", serve(executor=f"executor-{number}"), folder=folder, env={})
                for number in range(processes)
            ]
            system = Dbos(plain, Tally(tally), started, accounts)
            handles.callback(system.close)
            for process in started:
                handles.enter_context(process)
                process.until(system.ready, 60)  # the first one migrates
            yield system
