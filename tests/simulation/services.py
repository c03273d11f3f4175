"""A service of the simulator: its database, its dispatchers with production's own loops, its workers, its callers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from celery import Celery
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from celery_durable import commands
from celery_durable.crashpoints import crashpoint
from celery_durable.dispatcher.main import Dispatcher
from celery_durable.runtime import Runtime
from celery_durable.settings import Settings
from celery_durable.store import recovery
from celery_durable.store.accounts import client_identity
from celery_durable.store.delivery import Outbound
from celery_durable.store.operations import NewOperation, Operations
from celery_durable.store.schema import CANCELLED, FAILED, SUCCEEDED
from tests.simulation.databases import SimulatedDatabase, Slot, client_tables
from tests.simulation.processes import Process, SimulatedLoop
from tests.simulation.workers import HEARTBEAT_INTERVAL_MS, HEARTBEAT_TIMEOUT_MS, REQUEUE_AFTER_MS, Worker

if TYPE_CHECKING:
    from tests.simulation.shells import World

TOPIC_PREFIX = "durable"
PURGE_ROWS_MAX = 5
"""Operations that a caller deletes at once, at most."""


@cache
def client_settings(client_id: str, resend_min_s: float, idle_return_s: float) -> Settings:
    """A service's settings: shorter times than the defaults, so that a seed is short."""
    return Settings(
        client_id=client_id,
        database_url="sqlite:///simulated.sqlite3",
        kafka_bootstrap_servers="simulated:9092",
        topic_prefix=TOPIC_PREFIX,
        heartbeat_interval_s=HEARTBEAT_INTERVAL_MS / 1000,
        heartbeat_timeout_s=HEARTBEAT_TIMEOUT_MS / 1000,
        requeue_after_s=REQUEUE_AFTER_MS / 1000,
        resend_min_s=resend_min_s,
        resend_max_s=16.0,
        sends_max=4,
        idle_return_s=idle_return_s,
        poll_min_ms=2_000,
        poll_max_ms=10_000,
        deliver_batch_max=8,
        sent_not_started_max=4,
        kafka_publish_deadline_ms=3_000,
        _env_file=None,
    )


@cache
def _operations() -> Operations:
    return Operations(client_tables(), "sqlite", psycopg=False)


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message of Celery's broker."""

    id: str
    generation: int
    attempt: int


class Service:
    """One client: a database and what runs on it."""

    def __init__(self, world: World, name: str, client_id: str, slot: Slot) -> None:
        self.world = world
        self.name = name
        self.client_id = client_id
        self.slot = slot
        self.rng: random.Random = world.rng
        self.settings = client_settings(client_id, world.resend_min_s, world.idle_return_s)
        self.gone = False
        """Gone for ever."""
        self.web = Process(world, f"{name}-web")
        self.dispatchers: list[DispatcherProcess] = []
        self.workers: list[Worker] = []
        self.backlog: list[Delivery] = []
        """Messages that no worker has taken yet."""
        self.broker_life = 0
        self.slot_life = 0
        """How often its database was restored from a backup."""
        self.is_clone = False
        """It is a second database under a client ID that is taken."""
        self.copied_from: Service | None = None
        """That second database began as a copy of this one's."""
        self.told: dict[str, str] = {}
        """The ends of operations that the app's own result backend was told."""
        self.runtime = self.new_runtime()

    def new_runtime(self) -> Runtime:
        """The runtime of one process."""
        return Runtime(self.settings, SimulatedDatabase(self.slot), client_tables())

    def identify(self) -> None:
        """Makes the database this client's."""

        def work() -> None:
            with self.runtime.database.transaction() as connection:
                client_identity(connection, self.runtime.tables, self.client_id)

        self.web.run(work)

    def start(self, dispatchers: int, workers: int) -> None:
        """Starts processes."""
        for number in range(dispatchers):
            self.dispatchers.append(DispatcherProcess(self, number))
        for number in range(workers):
            self.workers.append(Worker(self, number))

    def processes(self) -> list[Process]:
        """All that can be killed."""
        return [*self.dispatchers, *self.workers]

    def poke(self) -> None:
        """A caller or a worker has written: the dispatchers' next look will find it."""
        for dispatcher in self.dispatchers:
            dispatcher.poke()

    def incarnation(self) -> str:
        """The random ID of its database."""
        found = self.slot.rows("SELECT incarnation FROM durable_client")
        return str(found[0][0]) if found else ""

    # Callers

    def call(self, operation_id: str, account: str | None, group: str, **options: Any) -> NewOperation:
        """One call of a task."""
        declared = self.world.declared
        if account is not None:
            self.world.runs.called[operation_id] = (account, group)
        return NewOperation(
            id=operation_id,
            task="task",
            queue="celery",
            content_type="application/json",
            content_encoding="utf-8",
            body=b"[[], {}, {}]",
            digest=operation_id,
            headers={"task": "task"},
            properties={},
            publish={},
            policy=declared,
            account=account,
            group=group,
            limit=declared.get("limit"),
            group_limit=declared.get("group_limit"),
            **options,
        )

    def enqueue(self, new: NewOperation) -> None:
        """What ``.delay()`` writes."""
        self._write_surely("enqueue.one", lambda connection: _operations().insert(connection, new))

    def enqueue_many(self, batch: Sequence[NewOperation]) -> None:
        """What ``.enqueue_many()`` writes: all of them, or none."""
        self._write_surely("enqueue.many", lambda connection: _operations().insert_many(connection, batch))

    def _write_surely(self, place: str, write: Callable[[Connection], Any]) -> None:
        """A caller writes, and the same under the same IDs again if the commit was in doubt."""

        def work() -> None:
            for _ in range(3):
                try:
                    with self.runtime.database.transaction(place) as connection:
                        write(connection)
                    break
                except OperationalError:
                    continue

        self.web.run(work)
        self.poke()

    def forget(self, operation_id: str) -> None:
        """A caller forgets a result."""

        def work() -> None:
            with suppress(OperationalError), self.runtime.database.transaction("results.forget") as connection:
                _operations().forget(connection, operation_id)

        self.web.run(work)

    def purge(self) -> None:
        """A caller deletes some of what has ended."""

        def work() -> None:
            with suppress(OperationalError), self.runtime.database.transaction("results.purge") as connection:
                recovery.purge(connection, self.runtime.tables, self.world.clock.now_ms, PURGE_ROWS_MAX)

        self.web.run(work)

    def cancel(self, operation_id: str) -> None:
        """A caller cancels an operation."""
        self.world.cancelled.add(operation_id)

        def work() -> None:
            with suppress(OperationalError), self.runtime.database.transaction("results.cancel") as connection:
                _operations().cancel(connection, operation_id, tells=self.world.tells)

        self.web.run(work)
        self.poke()

    def command(self, send: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """An operator's command, from this service."""

        def work() -> None:
            with suppress(OperationalError):  # an operator sees it, and looks whether it is there
                send(*arguments, by="simulation", why="simulation", app=Application(self), **options)

        self.web.run(work)
        self.poke()

    def set_limit(self, account: str, limit: int | None, group: str | None = None) -> None:
        """An operator's limit."""
        self.command(commands.set_limit, account, limit, group)

    # The app's result backend

    def tell(self, operation_id: str, state: str) -> None:
        """It is told how an operation ended, and keeps that; or it is away."""
        crashpoint("worker.outcome", "before_publish")
        if self.world.draw_silence():
            raise ConnectionError("simulated: the result backend is away")
        self.told[operation_id] = state
        crashpoint("worker.outcome", "after_publish")

    # Celery's broker

    def deliver(self, outbound: Outbound) -> None:
        """The broker takes a message, and may lose it or deliver it twice."""
        world, one = self.world, outbound.admitted
        message = Delivery(one.id, one.generation, one.attempt)
        world.stats["sent"] += 1
        if world.happens(world.weather.broker_loss):
            world.note("broker", self.name, "loses", message.id, message.attempt)
            return
        world.note("broker", self.name, "takes", message.id, message.attempt)
        for _ in range(1 + world.happens(world.weather.broker_double)):
            delay_ms = self.rng.randint(1, 30)
            if world.happens(world.weather.broker_slow):
                delay_ms = self.rng.randint(30, 20_000)
            self._arrives_later(delay_ms, message)

    def wipe_broker(self) -> None:
        """The broker forgets every message."""
        self.broker_life += 1
        self.backlog.clear()

    def _arrives_later(self, delay_ms: int, message: Delivery) -> None:
        life = self.broker_life
        self.world.at(delay_ms, lambda: self._arrives(message) if life == self.broker_life else None)

    def _arrives(self, message: Delivery) -> None:
        workers = [worker for worker in self.workers if worker.alive and not worker.frozen]
        if workers:
            workers[self.rng.randrange(len(workers))].receive(message)
        else:
            self.backlog.append(message)

    def redeliver_later(self, operation_id: str, generation: int, attempt: int) -> None:
        """A worker died before it acknowledged this message."""
        self._arrives_later(self.rng.choice((100, 5_000)), Delivery(operation_id, generation, attempt))

    def redeliver(self) -> None:
        """A worker is there (again)."""
        backlog, self.backlog = self.backlog, []
        for message in backlog:
            self._arrives(message)


@cache
def _celery() -> Celery:
    return Celery("simulated", broker="memory://", set_as_current=False)


class Results:
    """In place of an app's own result backend."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def mark_as_done(self, task_id: str, *_: Any, **__: Any) -> None:
        """It succeeded."""
        self._service.tell(task_id, SUCCEEDED)

    def mark_as_failure(self, task_id: str, *_: Any, **__: Any) -> None:
        """It failed."""
        self._service.tell(task_id, FAILED)

    def mark_as_revoked(self, task_id: str, *_: Any, **__: Any) -> None:
        """It was cancelled."""
        self._service.tell(task_id, CANCELLED)


class Application:
    """What production code takes for the Celery app: its own runtime and results, and all else of one real app."""

    def __init__(self, service: Service, runtime: Runtime | None = None) -> None:
        self.service = service
        self._celery_durable_runtime = service.runtime if runtime is None else runtime

    @property
    def backend(self) -> Any:
        """Its result backend."""
        return Results(self.service) if self.service.world.tells else _celery().backend

    def __getattr__(self, name: str) -> Any:
        return getattr(_celery(), name)


class DispatcherProcess(Process):
    """One dispatcher with all its loops."""

    def __init__(self, service: Service, number: int) -> None:
        super().__init__(service.world, f"{service.name}-dispatcher-{number}")
        self.service = service
        self.number = number
        self._poked = False
        self._watch: SimulatedLoop | None = None
        self.run(self._start)

    def _start(self) -> None:
        runtime = self.service.new_runtime()
        with runtime.database.transaction("dispatcher.identify") as connection:
            client_identity(connection, runtime.tables, self.service.client_id)
        dispatcher = Dispatcher(Application(self.service, runtime), runtime)
        dispatcher.start()
        self._watch = next(loop for loop in dispatcher._loops if loop.name == "watch")  # type: ignore[misc]

    def poke(self) -> None:
        """Has the watch look soon, instead of every quarter of a second."""
        if not self._poked and self._watch is not None:
            self._poked = True
            self.at(self.world.rng.randint(20, 250), self._look)

    def _look(self) -> None:
        self._poked = False
        if self._watch is not None:
            self._watch.wake()
