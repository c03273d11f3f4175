"""Real worker, dispatcher and holder processes for tests.

::

    def test_settles(stack):
        service = stack.service("billing")
        stack.holder()
        service.dispatcher()
        service.worker()
        result = service.task("add").delay(1, 2)
        assert result.get(timeout=30) == 3

``stack`` (a fixture) ends every process at the end of the test, also of a failed one, and prints their logs, labelled,
if it failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from celery_durable import spool
from celery_durable.kafka import topics
from celery_durable.runtime import runtime_of
from celery_durable.store.database import Database
from celery_durable.store.migrate import migrate as migrate_database
from holder_service.migrations import HOLDER
from holder_service.settings import HolderSettings
from holder_service.settings import load as load_holder_settings
from holder_service.store import build_tables as build_holder_tables
from tests.example.records import Record, read_records
from tests.services.postgresql import fresh_database
from tests.services.process import NotReady, ServerProcess, poll_until

if TYPE_CHECKING:
    from celery import Celery, Task

T = TypeVar("T")

EMBEDDED, REAL = "embedded", "real"
EXAMPLE = "tests.example.app"
REPOSITORY = Path(__file__).resolve().parents[1]
MOCK_FETCH_WAIT_MS = 5
"""The mock cluster never wakes a waiting fetch: see the setting ``kafka_fetch_wait_max_ms``."""


def wait_until(condition: Callable[[], T | None], deadline_s: float = 30, *, what: str = "condition") -> T:
    """Waits until ``condition`` returns something true and returns it; an AssertionError after the deadline."""
    try:
        return poll_until(condition, deadline_s, what=what)
    except NotReady as error:
        raise AssertionError(str(error)) from None


@contextlib.contextmanager
def within(deadline_s: float, what: str) -> Iterator[None]:
    """Fails as a missed deadline if its body takes longer; choose one far below what a wrong body would wait for."""
    started = time.monotonic()
    yield
    took_s = time.monotonic() - started
    assert took_s < deadline_s, f"not within {deadline_s:g} s: {what} (it took {took_s:.1f} s)"


@dataclass(frozen=True)
class Kafka:
    """A Kafka that a test uses under topics of its own."""

    bootstrap_servers: str
    kind: str
    topic_prefix: str = "celery-durable"

    @staticmethod
    def new_prefix() -> str:
        """A topic prefix that nobody else uses."""
        return f"t-{uuid.uuid4().hex[:12]}"

    @property
    def real(self) -> bool:
        """True for an Apache Kafka, False for the mock cluster."""
        return self.kind != "mock"

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of a service or a holder that uses it."""
        settings: dict[str, Any] = {
            "kafka_bootstrap_servers": self.bootstrap_servers,
            "topic_prefix": self.topic_prefix,
            "kafka_session_timeout_ms": 6_000,
        }
        if not self.real:
            settings["kafka_fetch_wait_max_ms"] = MOCK_FETCH_WAIT_MS
        return settings

    def create_topics(self, partitions: Mapping[str, int]) -> None:
        """Creates topics, by full name; on the mock cluster, which makes them on first use, nothing."""
        if not self.real:
            return
        from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers})
        for future in admin.create_topics([NewTopic(name, count, 1) for name, count in partitions.items()]).values():
            future.result(30)


class Process(ServerProcess):
    """A process of ours, with a label for its log."""

    def __init__(
        self, label: str, command: Sequence[str], *, folder: Path, env: Mapping[str, str], cwd: Path = REPOSITORY
    ) -> None:
        super().__init__(command, log=folder / f"{label}.log", env=env, cwd=cwd)
        self.label = label

    def freeze(self) -> None:
        """Stops the process and its children with SIGSTOP."""
        self.send_all(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continues the process and its children with SIGCONT."""
        self.send_all(signal.SIGCONT)

    def terminate(self, timeout_s: float = 15) -> int:
        """Ends the process with SIGTERM and returns its exit code; fails if it does not end in time."""
        self.send(signal.SIGTERM)
        return self.wait(timeout_s)

    def labelled(self, lines: int = 200) -> str:
        """The end of the log, each line with the label."""
        return "\n".join(f"{self.label} | {line}" for line in self.log_tail(lines).splitlines())


class Service:
    """One client: a Celery app with a database and a Celery broker of its own, on the stack's Kafka.

    :param settings: settings of celery-durable, over those of the stack.
    :param module: where the app is, and the ``make_app`` that makes it.
    """

    def __init__(
        self,
        stack: Stack,
        name: str,
        database_url: str,
        broker: dict[str, Any],
        settings: dict[str, Any],
        module: str = EXAMPLE,
    ) -> None:
        self.stack = stack
        self.module = module
        self.name = name
        self.folder = stack.folder / name
        self.folder.mkdir()
        self.database_url = database_url
        self.broker = broker
        self.settings = {
            "client_id": name,
            "database_url": database_url,
            "heartbeat_interval_s": 1.0,
            "heartbeat_timeout_s": 4.0,
            "poll_max_ms": 50,
            **stack.kafka.settings,
            **settings,
        }
        self.records_file = self.folder / "records.jsonl"

    @property
    def env(self) -> dict[str, str]:
        """The environment of the service's processes."""
        example = {
            "name": self.name,
            "broker": self.broker,
            "durable": self.settings,
            "records": str(self.records_file),
        }
        return {"EXAMPLE_APP": json.dumps(example)}

    @cached_property
    def app(self) -> Celery:
        """The service's app, for use in the test's own process."""
        app: Celery = import_module(self.module).make_app(**json.loads(self.env["EXAMPLE_APP"]))
        return app

    def task(self, name: str) -> Task:
        """A task of :mod:`tests.example.app` by its short name."""
        task: Task = self.app.tasks[f"example.{name}"]
        return task

    def records(self) -> list[Record]:
        """What the tasks recorded of their runs, in the order of the records."""
        return read_records(self.records_file)

    def worker(
        self,
        *,
        pool: str = "prefork",
        concurrency: int = 2,
        label: str = "",
        extra: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        wait: bool = True,
    ) -> Process:
        """Starts a worker and, if ``wait``, waits until it is ready."""
        label = label or f"{self.name}-worker{self.stack.number()}"
        words = ["worker", "--pool", pool, "--concurrency", str(concurrency), "--loglevel", "INFO"]
        words += ["--hostname", f"{label}@localhost", "--without-mingle", "--without-gossip", *extra]
        process = self._start(label, words, env)
        if wait:
            process.until(lambda: " ready." in process.log_tail(1_000), 60)
        return process

    def dispatcher(self, *, label: str = "", env: Mapping[str, str] | None = None) -> Process:
        """Starts a dispatcher. It is ready when it does its work: wait for that."""
        return self._start(label or f"{self.name}-dispatcher{self.stack.number()}", ["durable", "dispatcher"], env)

    def run(self, *words: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Runs ``celery -A app durable WORDS`` to its end, whatever its exit code."""
        return subprocess.run(
            [*self._celery(), "durable", *words],
            cwd=REPOSITORY,
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def _celery(self) -> list[str]:
        return [sys.executable, "-m", "celery", "-A", self.module]

    def _start(self, label: str, words: Sequence[str], env: Mapping[str, str] | None = None) -> Process:
        process = Process(label, [*self._celery(), *words], folder=self.folder, env={**self.env, **(env or {})})
        return self.stack.started(process)


class Stack:
    """Databases, brokers and processes of one test.

    :param postgresql: URL of a server; None: SQLite files.
    :param redis: address of a server and numbers of its free databases; None: a folder as the broker.
    """

    def __init__(
        self,
        folder: Path,
        *,
        kafka: Kafka,
        postgresql: str | None = None,
        redis: tuple[str, Iterator[int]] | None = None,
    ) -> None:
        self.folder = folder
        self.kafka = kafka
        self.kind = EMBEDDED if postgresql is None else REAL
        self._postgresql = postgresql
        self._redis = redis
        self._handles = contextlib.ExitStack()
        self._processes: list[Process] = []
        self._number = 0
        self._holder_url: str | None = None

    def number(self) -> int:
        """A number for the next label."""
        self._number += 1
        return self._number

    def new_database(self, name: str) -> str:
        """The URL of a fresh, empty database."""
        if self._postgresql is None:
            return f"sqlite:///{self.folder / name}.sqlite3"
        return self._handles.enter_context(fresh_database(self._postgresql))

    def new_broker(self, name: str) -> dict[str, Any]:
        """Celery's settings of a fresh broker."""
        if self._redis is not None:
            address, numbers = self._redis
            url = f"{address}/{next(numbers)}"
            self._flush(url)
            self._handles.callback(self._flush, url)
            return {"broker_url": url}
        return {"broker_url": spool.url(self.folder / f"{name}-broker")}

    def service(
        self, name: str = "billing", *, migrate: bool = True, module: str = EXAMPLE, **settings: Any
    ) -> Service:
        """A new service, its database migrated, its topics there."""
        service = Service(self, name, self.new_database(name), self.new_broker(name), settings, module)
        runtime = runtime_of(service.app)
        self._handles.callback(runtime.database.dispose)
        if migrate:
            migrate_database(runtime.database, runtime.tables)
        if self.kafka.real:
            topics.apply(runtime.settings, topics.client_topics(runtime.settings, name))
        return service

    @property
    def holder_url(self) -> str:
        """The URL of the holder's database; a holder must have been started."""
        assert self._holder_url is not None
        return self._holder_url

    def holder_env(self, **settings: Any) -> dict[str, str]:
        """The environment of a holder on the stack's one holder database, which this makes and migrates at first."""
        first = self._holder_url is None
        if self._holder_url is None:
            self._holder_url = self.new_database("holder")
        values: dict[str, Any] = {
            "database_url": self._holder_url,
            "poll_max_ms": 50,
            "group_id": f"{self.kafka.topic_prefix}-holder",
        }
        values |= {**self.kafka.settings, **settings}
        env = {
            f"HOLDER_{name.upper()}": value if isinstance(value, str) else json.dumps(value)
            for name, value in values.items()
        }
        if first:
            self._prepare_holder(load_holder_settings(**values))
        return env

    def _prepare_holder(self, settings: HolderSettings) -> None:
        database = Database(settings.database_url.get_secret_value())
        migrate_database(database, build_holder_tables(), migrations=HOLDER)
        database.dispose()
        if self.kafka.real:
            topics.apply(settings, topics.holder_topics(settings))

    def holder(self, *, label: str = "", **settings: Any) -> Process:
        """Starts a holder with the settings. Several share partitions."""
        label = label or f"holder{self.number()}"
        command = [sys.executable, "-m", "holder_service.cli", "run"]
        return self.started(Process(label, command, folder=self.folder, env=self.holder_env(**settings)))

    def holder_run(self, *words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Runs ``holder-service WORDS`` to its end, whatever its exit code."""
        env = self.holder_env() if env is None else env
        return subprocess.run(
            [sys.executable, "-m", "holder_service.cli", *words],
            cwd=REPOSITORY,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def started(self, process: Process) -> Process:
        """Starts the process and ends it with the stack."""
        self._processes.append(process)
        process.start()
        return process

    def logs(self) -> str:
        """What every process of the stack wrote last, each line labelled."""
        return "\n".join(process.labelled() for process in self._processes)

    def close(self) -> None:
        """Ends every process, then drops databases and brokers."""
        for process in self._processes:
            process.thaw()
            if "worker" in process.command:
                process.send_all(signal.SIGKILL)  # it would wait for its bodies
            else:
                process.send(signal.SIGTERM)  # who reads Kafka leaves its group, or the next member waits for it
        deadline = time.monotonic() + 3
        while any(process.alive for process in self._processes) and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in self._processes:
            process.kill()
        self._handles.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _flush(url: str) -> None:
        import redis

        with redis.Redis.from_url(url) as client:
            client.flushdb()
