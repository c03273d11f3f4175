"""celery-durable, running: services with their workers and dispatchers, and a holder, as a user starts them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg

from benchmarks.setting.child import Child, start_together
from benchmarks.setting.running import Running, shares
from benchmarks.setting.servers import Servers
from benchmarks.setting.tally import Tally
from benchmarks.systems.durable_app import tally_path
from tests.harness import Process, Service, Stack

MODULE = "benchmarks.systems.durable_app"
DEFAULTS: dict[str, Any] = {
    "heartbeat_interval_s": 10.0,
    "heartbeat_timeout_s": 30.0,
    "poll_max_ms": 250,
    "kafka_session_timeout_ms": 10_000,
}
"""The harness has settings of its own for tests; these are the defaults again."""
HOLDER_DEFAULTS: dict[str, Any] = {"poll_max_ms": 250, "kafka_session_timeout_ms": 10_000}
SETTINGS = (
    "default settings; one dispatcher a service, one holder, PostgreSQL, Apache Kafka; Celery on Redis as plain "
    "Celery's, worker prefork with 2 processes, prefetch multiplier 64"
)


def app_of(service: Service) -> dict[str, Any]:
    """What makes the service's app in another process."""
    fields: dict[str, Any] = json.loads(service.env["EXAMPLE_APP"])
    return fields


def new_service(stack: Stack, name: str, **settings: Any) -> Service:
    """A service with default settings, nothing of it started."""
    return stack.service(name, module=MODULE, **{**DEFAULTS, **settings})


def start_holder(stack: Stack, **settings: Any) -> Process:
    """A holder with default settings."""
    return stack.holder(**{**HOLDER_DEFAULTS, **settings})


def start_worker(service: Service, concurrency: int, pool: str = "prefork") -> Process:
    """A worker that logs what plain Celery's does."""
    return service.worker(pool=pool, concurrency=concurrency, extra=("--loglevel", "WARNING"), wait=False)


class Durable(Running):
    """Some services. Each is sent its share of the calls by ``callers`` processes of its own.

    :param sender: what sends, of :mod:`benchmarks.systems.durable_send`. :param fields: its further parameters, which
        may be changed from one sending to the next.
    """

    def __init__(
        self,
        services: Sequence[Service],
        processes: Sequence[Process],
        sender: str = "send",
        callers: int = 1,
        **fields: Any,
    ) -> None:
        super().__init__([Tally(tally_path(service.records_file)) for service in services], processes)
        self.processes = list(processes)
        self.services = list(services)
        self._sender = f"benchmarks.systems.durable_send:{sender}"
        self._callers = callers
        self.fields = fields
        self._connections = [
            psycopg.connect(service.database_url.replace("+psycopg", ""), autocommit=True) for service in services
        ]

    def send(self, count: int) -> list[Child]:
        callers = [service for service in self.services for _ in range(self._callers)]
        children = [
            Child(self._sender, gated=True, app=app_of(service), count=share, **self.fields)
            for service, share in zip(callers, shares(count, len(callers)), strict=False)
        ]
        return start_together(children)

    def ended(self) -> int:
        return sum(self.succeeded(number) for number in range(len(self.services)))

    def succeeded(self, number: int) -> int:
        """How many operations of one service have succeeded."""
        query = "SELECT count(*) FROM durable_operations WHERE state = 'succeeded'"
        row = self._connections[number].execute(query).fetchone()
        return 0 if row is None else int(row[0])

    def newest(self) -> list[int]:
        """The number of each service's newest operation."""
        return [int(self._ask(number, "SELECT coalesce(max(order_no), 0) FROM durable_operations")[0])
                for number in range(len(self.services))]  # fmt: skip

    def start_delays_ms(self, after: Sequence[int]) -> list[float]:
        """From enqueue to start, by the database's clock, of all operations that are newer than those numbers."""
        query = "SELECT started_at - enqueued_at FROM durable_operations WHERE order_no > %s"
        return [float(delay) for number, last in enumerate(after) for delay in self._ask(number, query, last)]

    def _ask(self, number: int, query: str, *parameters: int) -> list[Any]:
        return [row[0] for row in self._connections[number].execute(query, parameters).fetchall()]

    def close(self) -> None:
        """Ends its connections."""
        for connection in self._connections:
            connection.close()


@contextlib.contextmanager
def running(
    servers: Servers,
    *,
    services: int = 1,
    concurrency: int = 2,
    pool: str = "prefork",
    sender: str = "send",
    callers: int = 1,
    **fields: Any,
) -> Iterator[Durable]:
    """So many services, each with a dispatcher and a worker, under one holder; parameters as of :class:`Durable`."""
    with servers.stack() as stack:
        processes = [start_holder(stack)]
        made = [new_service(stack, f"service{number}") for number in range(services)]
        for service in made:
            processes += [service.dispatcher(), start_worker(service, concurrency, pool)]
        system = Durable(made, processes, sender, callers, **fields)
        try:
            yield system
        finally:
            system.close()
