"""What a chaos run works on: servers and processes of its own, each of which can be hit and brought back."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Self

import amqp
import psutil
import psycopg

from tests.chaos.app import STURDY_QUEUE
from tests.chaos.faults import Broker
from tests.harness import Kafka, Process, Service, Stack
from tests.services import PostgreSQL, RabbitMQ, Redis, start_kafka

HEARTBEAT_TIMEOUT_S = 5.0
SERVICES = ("a", "b")
_SETTINGS: dict[str, Any] = {
    "heartbeat_interval_s": 1.0,
    "heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S,
    "max_worker_losses": 1_000,
    "requeue_after_s": 2.0,
    "resend_min_s": 1.0,
    "resend_max_s": 10.0,
    "idle_return_s": 6.0,
    "poll_max_ms": 50,
}
_CELERY = {"worker_prefetch_multiplier": 1, "worker_enable_remote_control": False}


@dataclass
class Slot:
    """A place for one process: what runs there may be killed, and another one comes in its place."""

    name: str
    start: Callable[[], Process]
    process: Process | None = None
    back_at_s: float | None = None
    """When (monotonic) a fault allows it to run again; None: no fault ended it."""
    begun_s: float = 0.0

    def ensure(self) -> int | None:
        """Starts what should run and does not. Returns the exit code of a process that ended by itself."""
        if self.process is not None and self.process.alive:
            return None
        code = None if self.process is None or self.back_at_s is not None else self.process.returncode
        if self.back_at_s is None or time.monotonic() >= self.back_at_s:
            self.process, self.back_at_s, self.begun_s = self.start(), None, time.monotonic()
        return code

    def pids(self) -> tuple[int, ...]:
        """The process, first, and all below it."""
        assert self.process is not None
        return (self.process.pid, *self.children())

    def children(self) -> list[int]:
        """The processes below it."""
        assert self.process is not None
        try:
            return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self, back_at_s: float) -> None:
        """Ends it with SIGKILL, with all that it started."""
        assert self.process is not None
        self.back_at_s = back_at_s
        self.process.kill()

    def kill_main(self, back_at_s: float) -> None:
        """Ends its main process alone with SIGKILL, as the kernel does that is out of memory."""
        assert self.process is not None
        self.back_at_s = back_at_s
        self.process.send(signal.SIGKILL)
        self.process.wait(10)


@dataclass
class System:
    """Two services, two holders, and the servers that they need. Everything ends with the context.

    :param protocol: the setting ``kafka_group_protocol`` of all.
    """

    folder: Path
    broker_kind: Broker
    protocol: str
    handles: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.handles.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.handles.close()

    @property
    def history(self) -> Path:
        """The file of :mod:`tests.chaos.history`."""
        return self.folder / "history.jsonl"

    def _start(self) -> None:
        enter = self.handles.enter_context
        # A server ends with the thread that started it: these stay until all have ended.
        self.starter = enter(ThreadPoolExecutor(3, "starter"))
        # What it had written survives its processes in the kernel's memory: only a machine's end would need more.
        self.postgresql = enter(PostgreSQL({"fsync": "off", "full_page_writes": "off"}))
        self.kafka = start_kafka(mock=False, external=False)
        self.handles.callback(self.kafka.stop)
        self.broker: Redis | RabbitMQ = enter(Redis()) if self.broker_kind == "redis" else enter(RabbitMQ())
        kafka = Kafka(self.kafka.bootstrap_servers, self.kafka.kind, Kafka.new_prefix())
        self.stack = enter(Stack(self.folder, kafka=kafka, postgresql=self.postgresql.url()))
        numbers = count()
        settings = {**_SETTINGS, "kafka_group_protocol": self.protocol}
        self.services: dict[str, Service] = {}
        for name in SERVICES:
            service = self.stack.service(name, module="tests.chaos.app", **settings)
            service.records_file = self.history
            service.broker = {"broker_url": self._broker_url(next(numbers)), **_CELERY}
            self.services[name] = service
        self.stack.holder_env(kafka_group_protocol=self.protocol)  # makes the database, while PostgreSQL is up
        self.slots = {slot.name: slot for slot in self._slots()}

    def _broker_url(self, number: int) -> str:
        return self.broker.url(number) if isinstance(self.broker, Redis) else self.broker.new_vhost()

    def _slots(self) -> Iterator[Slot]:
        a, b = self.services["a"], self.services["b"]
        for name in ("holder", "second-holder"):
            yield Slot(name, partial(self.stack.holder, label=name, kafka_group_protocol=self.protocol))
        for service, name in ((a, "a-dispatcher"), (a, "a-second-dispatcher"), (b, "b-dispatcher")):
            yield Slot(name, partial(service.dispatcher, label=name))
        for service, name in ((a, "a-prefork"), (b, "b-prefork"), (b, "b-second")):
            yield Slot(name, partial(_worker, service, name, "prefork", 2))
        yield Slot("a-threads", partial(_worker, a, "a-threads", "threads", 3))

    def forget_messages(self) -> None:
        """Flushes Redis, or purges the queues of RabbitMQ."""
        if isinstance(self.broker, Redis):
            self.broker.flush()
            return
        for service in self.services.values():
            vhost = service.broker["broker_url"].rpartition("/")[2]
            connection = amqp.Connection(f"127.0.0.1:{self.broker.port}", virtual_host=vhost)
            with connection:
                for queue in ("celery", STURDY_QUEUE):
                    connection.channel().queue_purge(queue)

    def lose_holder_database(self) -> None:
        """Drops the holder's database under its holders, and makes it anew, as an operator would: create, migrate."""
        name = self.stack.holder_url.rpartition("/")[2]
        plain = self.postgresql.url().replace("+psycopg", "")
        with psycopg.connect(plain, autocommit=True) as connection:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
            connection.execute(f'CREATE DATABASE "{name}"')
        done = self.stack.holder_run("migrate")
        assert done.returncode == 0, done.stderr


def _worker(service: Service, name: str, pool: str, concurrency: int) -> Process:
    queues = f"celery,{STURDY_QUEUE}" if pool == "prefork" else "celery"
    return service.worker(label=name, pool=pool, concurrency=concurrency, extra=["-Q", queues], wait=False)
