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

import psycopg
from pydantic import SecretStr
from sqlalchemy import Connection, delete, insert, select, update

from benchmarks.report.figures import percentile
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


def fill(connection: psycopg.Connection, table: str, account: str, number: int) -> None:
    """So many operations wait in the account; those that were put there before count."""
    connection.execute(
        f"INSERT INTO {table} (id, task, account, queue, state, enqueued_at) "
        f"SELECT 'w' || n, 't', %s, 'celery', '{QUEUED}', n FROM generate_series(1, %s) n ON CONFLICT (id) DO NOTHING",
        (account, number),
    )
    connection.execute("VACUUM ANALYZE")


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

    def prepare(self, number: int, version: int = 1) -> None:
        """So many operations wait in the full account, which has a lease of one permit."""
        plain = self.runtime.settings.database_url.get_secret_value().replace("+psycopg", "")
        with psycopg.connect(plain, autocommit=True) as connection:
            fill(connection, self.tables.operations.name, FULL, number)
        with self.database.transaction() as connection:
            wake(connection, self.tables, [FULL])
        self.rest()
        self.lease(FULL, version)
        self.rest()

    def measure(self, turns: int) -> tuple[list[float], list[float]]:
        """ms of passes that follow a settle in the full account, and of passes that bring a new account's first report.

        The first :data:`WARM_UP` turns are not counted.
        """
        own: list[float] = []
        other: list[float] = []
        for _ in range(turns):
            self.settle_one()
            with measured(own):
                self.passes.step()
            self.rest()
            with self.database.transaction() as connection:
                self.enqueue(connection, f"unrelated:{self._number}")
                wake(connection, self.tables, [FULL])
            with measured(other):
                self.passes.step()
            self.rest()
        return own[WARM_UP:], other[WARM_UP:]

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
            after_commit = self.passes.apply_replies(connection, [reply], one_by_one=False)
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
    """Median and 99th percentile."""
    return f"p50 {percentile(times, 0.5):6.2f} ms   p99 {percentile(times, 0.99):6.2f} ms"


def run(url: str) -> None:
    """Prints one line for each number of waiting operations."""
    service = Service(url)
    for version, number in enumerate(WAITING, 1):
        service.prepare(number, version)
        own, other = service.measure(TURNS + WARM_UP)
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
