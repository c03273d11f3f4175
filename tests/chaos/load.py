"""Light work for both services while faults happen, drawn from the seed, and a witness of the machine's own stalls."""

from __future__ import annotations

import math
import random
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from celery_durable.runtime import runtime_of
from tests.chaos import history
from tests.chaos.history import Enqueued, Stall
from tests.chaos.plans import FRESH, WARM, limited
from tests.chaos.work import draw_work
from tests.harness import Service

PROBE_EVERY_S = 0.5
STALL_S = 1.0
_RETRY_S = 0.1


class Background(threading.Thread):
    """A thread that goes on until :attr:`stopping` is set."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.stopping = threading.Event()


class Load(Background):
    """Enqueues into one service until it is told to stop; what it has begun to enqueue then is enqueued.

    :param rate: operations a second, beside three probes every :data:`PROBE_EVERY_S`.
    """

    def __init__(self, service: Service, path: Path, seed: int, *, rate: float) -> None:
        super().__init__(f"load-{service.name}")
        self._service = service
        self._path = path
        self._work = draw_work(seed, service.name, rate=rate)
        self._ids = random.Random(f"ids {seed} {service.name}")
        self._probes = 0
        self._cancels: list[tuple[float, str]] = []
        """When (monotonic) to cancel which operation."""
        self.failure: BaseException | None = None
        """What ended it, if that was not :attr:`stopping`."""

    def run(self) -> None:
        """The thread's body."""
        try:
            work_s = probe_s = time.monotonic()
            while not self.stopping.wait(max(0.0, min(work_s, probe_s) - time.monotonic())):
                self._cancel(time.monotonic())
                if probe_s <= work_s:
                    self._probe()
                    probe_s = time.monotonic() + PROBE_EVERY_S
                else:
                    pause_s = self._next()
                    work_s = time.monotonic() + pause_s
            self._cancel(math.inf)
        except BaseException as error:
            self.failure = error
            raise

    def _next(self) -> float:
        """Enqueues the next work; returns how long after it the one after that comes."""
        work = next(self._work)
        operation = self._enqueue(work.task, work.plan, work.duration_s, work.account, work.group)
        if work.cancel_after_s is not None:
            self._cancels.append((time.monotonic() + work.cancel_after_s, operation))
        return work.pause_s

    def warm_up(self) -> None:
        """Enqueues the first operation of the account that is to have a lease."""
        self._enqueue("permit", "succeed", 0, limited(f"{WARM}:{self._service.name}", 4), "")

    def _probe(self) -> None:
        self._probes += 1
        name = self._service.name
        self._enqueue("permit", "succeed", 0, limited(f"{FRESH}:{name}-{self._probes}", 1), "")
        self._enqueue("permit", "succeed", 0, limited(f"{WARM}:{name}", 4), "")
        self._enqueue("plain", "succeed", 0, "", "")

    def _cancel(self, until_s: float) -> None:
        """Cancels what is to be cancelled by then."""
        due = [operation for at_s, operation in self._cancels if at_s <= until_s]
        self._cancels = [entry for entry in self._cancels if entry[0] > until_s]
        for operation in due:
            result = self._service.app.tasks["chaos.permit"].AsyncResult(operation)
            _until_committed(result.cancel)

    def _enqueue(self, task: str, plan: str, duration_s: float, account: str, group: str) -> str:
        """Again under the same ID until it is committed: the same call twice is one operation. Returns the ID."""
        found = self._service.app.tasks[f"chaos.{task}"]
        operation = f"{self._service.name}-{uuid.UUID(int=self._ids.getrandbits(128)).hex[:16]}"
        _until_committed(lambda: found.apply_async((plan, duration_s, account, group), task_id=operation))
        history.write(
            self._path,
            Enqueued(operation=operation, service=self._service.name, plan=plan, account=account, group=group),
        )
        return operation


def _until_committed(write: Callable[[], object]) -> None:
    """Writes, again and again while the database is away."""
    while True:
        try:
            write()
        except DBAPIError:
            time.sleep(_RETRY_S)
        else:
            return


class Witness(Background):
    """Notes when the machine did not run this thread, or a service's database did not answer, for :data:`STALL_S`."""

    def __init__(self, services: list[Service], path: Path, *, excused: Callable[[], bool]) -> None:
        """:param excused: whether the database is away by a fault of the driver's own."""
        super().__init__("witness")
        self._services = services
        self._path = path
        self._excused = excused

    def run(self) -> None:
        """The thread's body."""
        before_s = time.monotonic()
        while not self.stopping.wait(0.1):
            self._note("the driver's thread", before_s)
            for service in self._services:
                begun_s = time.monotonic()
                try:
                    with runtime_of(service.app).database.reading() as connection:
                        connection.execute(text("SELECT 1"))
                except DBAPIError:
                    continue
                if not self._excused():
                    self._note("a database", begun_s, service.name)
            before_s = time.monotonic()

    def _note(self, what: str, since_s: float, service: str = "") -> None:
        lasted_s = time.monotonic() - since_s
        if lasted_s > STALL_S:
            history.write(self._path, Stall(what=what, lasted_s=round(lasted_s, 3), service=service))
