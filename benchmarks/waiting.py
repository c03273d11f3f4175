"""What do passes cost while many operations wait? The figures of cases A28 and A29.

``python -m benchmarks.waiting [URL]``: on an empty PostgreSQL database (without URL: a server of its own). Prints for
each number of waiting operations how long the pass takes that follows a settle in their account, and how long the one
that brings the first report of an unrelated account, with which a saturated account might interfere.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pydantic import SecretStr
from sqlalchemy import Connection, delete, insert, select, text, update

from celery_durable.dispatcher.passes import Passes
from celery_durable.permits.messages import AccountReply, ReplyGroup
from celery_durable.runtime import Runtime
from celery_durable.settings import Settings
from celery_durable.store.accounts import client_identity, wake
from celery_durable.store.clock import now_ms
from celery_durable.store.database import Database
from celery_durable.store.migrate import migrate
from celery_durable.store.schema import ADMITTED, QUEUED, SUCCEEDED, build_tables
from tests.services import PostgreSQL

WAITING = (100, 10_000, 100_000, 1_000_000)
TURNS, WARM_UP = 300, 30
FULL = "full"


class Service:
    """One service's database, with its passes."""

    def __init__(self, url: str) -> None:
        settings = Settings(client_id="benchmark", database_url=SecretStr(url), kafka_bootstrap_servers="127.0.0.1:1")
        self.runtime = Runtime(settings, Database(url), build_tables())
        self.database, self.tables = self.runtime.database, self.runtime.tables
        migrate(self.database, self.tables)
        self.passes = Passes(self.runtime)
        with self.database.transaction() as connection:
            self.identity = client_identity(connection, self.tables, "benchmark")
        self._number = 0

    def enqueue(self, connection: Connection, account: str) -> None:
        """One operation, as an enqueue inserts it."""
        self._number += 1
        row = {"id": f"op-{self._number}", "task": "t", "queue": "celery", "account": account, "state": QUEUED}
        connection.execute(insert(self.tables.operations).values(**row, enqueued_at=now_ms()))
        wake(connection, self.tables, [account])

    def fill(self, number: int) -> None:
        """So many operations wait in the full account."""
        statement = text(
            f"INSERT INTO {self.tables.operations.name} (id, task, account, queue, state, enqueued_at) "
            f"SELECT 'w' || n, 't', '{FULL}', 'celery', '{QUEUED}', n FROM generate_series(1, :n) n "
            "ON CONFLICT (id) DO NOTHING"
        )
        with self.database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(statement, {"n": number})
            connection.execute(text("VACUUM ANALYZE"))

    def rest(self) -> None:
        """Passes until nothing is to be done at once, and what they said is sent."""
        while self.passes.step() is None:
            pass
        with self.database.transaction() as connection:
            connection.execute(delete(self.tables.outbox))

    def lease(self, account: str, version: int) -> None:
        """The holder gives the account one permit."""
        client_id, incarnation = self.identity
        with self.database.transaction() as connection:
            counters = self.tables.counters
            seq = connection.execute(select(counters.c.value).where(counters.c.name == "report_seq")).scalar_one()
            reply = AccountReply(
                client_id=client_id,
                incarnation=incarnation,
                account=account,
                epoch=1,
                version=version,
                answers=seq,
                groups=(ReplyGroup(permits=1),),
            )
            after_commit = self.passes.apply_replies(connection, [reply])
        after_commit()

    def settle_one(self) -> None:
        """What runs in the full account ends."""
        operations = self.tables.operations
        with self.database.transaction() as connection:
            connection.execute(
                update(operations)
                .where(operations.c.account == FULL, operations.c.state == ADMITTED)
                .values(state=SUCCEEDED, due_at=None, ended_at=now_ms())
            )
            wake(connection, self.tables, [FULL])


@contextmanager
def measured(times: list[float]) -> Iterator[None]:
    """Adds how many ms it takes."""
    began = time.perf_counter()
    yield
    times.append((time.perf_counter() - began) * 1000)


def figures(times: Sequence[float]) -> str:
    """Median and 99th percentile of all but the first ones."""
    warm = sorted(times[WARM_UP:])
    return f"p50 {warm[len(warm) // 2]:6.2f} ms   p99 {warm[len(warm) * 99 // 100]:6.2f} ms"


def run(url: str) -> None:
    """Prints one line for each number of waiting operations."""
    service = Service(url)
    for version, number in enumerate(WAITING, 1):
        service.fill(number)
        with service.database.transaction() as connection:
            wake(connection, service.tables, [FULL])
        service.rest()
        service.lease(FULL, version)
        service.rest()
        own: list[float] = []
        other: list[float] = []
        for turn in range(TURNS + WARM_UP):
            service.settle_one()
            with measured(own):
                service.passes.step()
            service.rest()
            with service.database.transaction() as connection:
                service.enqueue(connection, f"unrelated:{number}:{turn}")
                wake(connection, service.tables, [FULL])
            with measured(other):
                service.passes.step()
            service.rest()
        print(f"{number:>9,} waiting   their pass {figures(own)}   an unrelated account {figures(other)}", flush=True)
    service.database.dispose()


def main(arguments: Sequence[str]) -> int:
    """Runs on the database that is named, or on a server of its own."""
    if arguments:
        run(arguments[0])
        return 0
    with PostgreSQL() as server:
        run(server.url())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
