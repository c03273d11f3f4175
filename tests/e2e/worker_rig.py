"""One service with a real worker, and its dispatcher's delivery and recovery in threads of the test."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from celery import Celery
from sqlalchemy import func, select
from sqlalchemy.exc import DBAPIError

from celery_durable.dispatcher.delivery import Delivery
from celery_durable.dispatcher.recovery import Recovery
from celery_durable.dispatcher.telling import Telling
from celery_durable.message import ATTEMPT_HEADER, GENERATION_HEADER
from celery_durable.runtime import Runtime, runtime_of
from celery_durable.scheduling.loop import Step
from celery_durable.store.migrate import migrate
from celery_durable.store.schema import ADMITTED, ENDED_STATES
from tests.e2e.worker_app import make_app
from tests.example.records import whole_lines
from tests.harness import Process, wait_until

POOLS = ("prefork", "spawn", "threads", "solo")
HEARTBEAT_TIMEOUT_S = 2.0


class Rig:
    """A service: database, broker, worker processes, delivery and recovery.

    :param celery: settings of Celery: the broker, the result backend.
    """

    def __init__(self, folder: Path, database_url: str, celery: dict[str, Any], *, pool: str, **durable: Any) -> None:
        self.folder = folder
        self.pool = pool
        self.records_file = folder / "records.jsonl"
        settings = {
            "client_id": "billing",
            "database_url": database_url,
            "kafka_bootstrap_servers": "127.0.0.1:1",
            "heartbeat_interval_s": 0.5,
            "heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S,
            "resend_min_s": 3.0,
            **durable,
        }
        celery = {"worker_pool_start_method": "spawn" if pool == "spawn" else "fork", **celery}
        self.config = {"celery": celery, "durable": settings, "records": str(self.records_file)}
        self.app: Celery = make_app(**self.config)
        self.runtime: Runtime = runtime_of(self.app)
        migrate(self.runtime.database, self.runtime.tables)
        self._processes: list[Process] = []
        self._threads: list[threading.Thread] = []
        self._delivery = Delivery(self.app, self.runtime)
        self._stopping = threading.Event()

    def worker(
        self,
        *,
        concurrency: int = 4,
        extra: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        ready: bool = True,
        without: Sequence[str] = (),
    ) -> Process:
        """Starts a worker and waits until it is ready, unless it is not expected to live that long."""
        label = f"worker{len(self._processes)}"
        pool = "prefork" if self.pool == "spawn" else self.pool
        words = [sys.executable, "-m", "celery", "-A", "tests.e2e.worker_app", "worker", "--pool", pool]
        words += ["--concurrency", str(concurrency), "--loglevel", "INFO", "--hostname", f"{label}@localhost"]
        words += ["--without-mingle", "--without-gossip", *extra]
        process = Process(
            label,
            words,
            folder=self.folder,
            env={"WORKER_APP": json.dumps({**self.config, "without": without}), **(env or {})},
        )
        self._processes.append(process)
        process.start()
        if ready:
            process.until(lambda: " ready." in process.log_tail(1_000), 60)
        return process

    def dispatch(self) -> None:
        """Starts delivery, recovery and telling."""
        recovery = Recovery(self.app, self.runtime)
        for step in (self._delivery.step, recovery.step, Telling(self.app, self.runtime).step):
            thread = threading.Thread(target=self._loop, args=(step,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _loop(self, step: Step) -> None:
        try:
            while not self._stopping.wait(0.02):
                with contextlib.suppress(DBAPIError):  # the database of a test may be away
                    step()
        finally:
            self.runtime.database.drop_held()

    def call(self, task: str, *args: Any, **options: Any) -> str:
        """Enqueues a call and returns the operation's ID."""
        return str(self.app.tasks[task].apply_async(args, **options).id)

    def publish(self, operation_id: str, copies: int = 1) -> None:
        """Sends the message of the operation's present attempt, as a dispatcher would that sends it again."""
        operations, payloads = self.runtime.tables.operations, self.runtime.tables.payloads
        with self.runtime.database.reading() as connection:
            row = connection.execute(select(operations).where(operations.c.id == operation_id)).one()
            payload = connection.execute(select(payloads).where(payloads.c.id == operation_id)).one()
        headers = {**payload.headers, ATTEMPT_HEADER: row.attempt, GENERATION_HEADER: row.generation}
        with self.app.producer_pool.acquire(block=True) as producer:
            for _ in range(copies):
                producer.publish(
                    payload.body,
                    content_type=payload.content_type,
                    content_encoding=payload.content_encoding,
                    headers=headers,
                    **payload.properties,
                    **payload.publish,
                )

    def row(self, operation_id: str) -> Any:
        """The operation's row."""
        operations = self.runtime.tables.operations
        with self.runtime.database.reading() as connection:
            return connection.execute(select(operations).where(operations.c.id == operation_id)).one()

    def attempts(self, operation_id: str) -> list[Any]:
        """The rows of its attempts that failed, were lost or retried."""
        attempts = self.runtime.tables.attempts
        statement = select(attempts).where(attempts.c.operation_id == operation_id).order_by(attempts.c.no)
        with self.runtime.database.reading() as connection:
            return list(connection.execute(statement))

    def history(self, operation_id: str) -> list[str]:
        """The outcomes of those attempts."""
        return [row.outcome for row in self.attempts(operation_id)]

    def sent(self, queue: str) -> int:
        """How many operations were sent to the Celery queue and have not started."""
        operations = self.runtime.tables.operations
        under_way = (operations.c.queue == queue, operations.c.state == ADMITTED, operations.c.sends > 0)
        with self.runtime.database.reading() as connection:
            return int(connection.scalar(select(func.count()).select_from(operations).where(*under_way)) or 0)

    def untold(self) -> list[str]:
        """The operations that have ended, and whose end may not have been told."""
        with self.runtime.database.reading() as connection:
            return list(connection.scalars(select(self.runtime.tables.untold.c.operation_id)))

    def ended(self, operation_id: str, deadline_s: float = 30) -> Any:
        """Waits until the operation has ended and returns its row."""

        def look() -> Any:
            row = self.row(operation_id)
            return row if row.state in ENDED_STATES else None

        return wait_until(look, deadline_s, what=f"end of operation {operation_id}")

    def result(self, operation_id: str) -> Any:
        """The AsyncResult of the operation."""
        return self.app.tasks["add"].AsyncResult(operation_id)

    def records(self, operation_id: str | None = None, event: str | None = None) -> list[dict[str, Any]]:
        """What the bodies noted."""
        lines = [json.loads(line) for line in whole_lines(self.records_file)]
        return [
            line
            for line in lines
            if (operation_id is None or line["id"] == operation_id) and (event is None or line["event"] == event)
        ]

    def runs(self, operation_id: str) -> int:
        """How often its body ran."""
        return len(self.records(operation_id, "start"))

    def started(self, operation_id: str, count: int = 1) -> dict[str, Any]:
        """Waits until its body has started so often; returns the newest start."""
        wait_until(lambda: self.runs(operation_id) >= count, what=f"start of {operation_id}")
        return self.records(operation_id, "start")[-1]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Somebody else holds SQLite's write lock."""
        lock = sqlite3.connect(self.runtime.database.url.database or "", isolation_level=None)
        lock.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            lock.execute("COMMIT")
            lock.close()

    def logs(self) -> str:
        """What the workers wrote."""
        return "\n".join(process.labelled(400) for process in self._processes)

    def log_has(self, text: str) -> bool:
        """Whether a worker wrote this."""
        return any(text in process.log.read_text(errors="replace") for process in self._processes)

    def flag(self, name: str) -> Path:
        """A file that a body waits for."""
        return self.folder / f"flag-{name}"

    def close(self) -> None:
        """Ends everything."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(10)
        for process in self._processes:
            process.thaw()
            process.kill()
        self._delivery.close()
        self.runtime.database.dispose()
        self.app.close()


def alive(pid: int) -> bool:
    """Whether the process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
