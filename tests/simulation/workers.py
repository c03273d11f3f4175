"""A worker of the simulator: what is delivered it starts, keeps alive and settles, by production's statements.

It is its main process too: that settles for a child of its pool that has died (``lose``) or was told to (``revoke``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import OperationalError

from celery_durable.crashpoints import crashpoint
from celery_durable.message import CapturedMessage
from celery_durable.store.attempts import AlreadySettled, Attempt, Attempts, Ending
from celery_durable.store.losses import Losses
from celery_durable.store.schema import ENDED_STATES
from celery_durable.store.untold import Mark
from tests.simulation.databases import SimulatedDatabase, client_tables
from tests.simulation.processes import Process

if TYPE_CHECKING:
    from tests.simulation.services import Delivery, Service

HEARTBEAT_TIMEOUT_MS = 6_000
HEARTBEAT_INTERVAL_MS = 2_000
REQUEUE_AFTER_MS = 5_000
_RESULT = Ending("application/json", "utf-8", b"null")


@dataclass(eq=False, slots=True)
class Body:
    """One attempt as its worker sees it."""

    worker: Worker
    attempt: Attempt
    renewed_ms: int
    """When it was started, or may have been, or had its last good heartbeat."""
    started: bool = False
    """Its start was granted."""
    hindered: str | None = None
    """What has come between it and its row since its last good heartbeat."""
    database_replaced: bool = False
    """It ran in a database that is an older copy now, or in the original of this one."""
    settled: bool = False
    ending: str = ""
    returned: bool = False
    """It runs no more, settled or not."""
    over: bool = False

    @property
    def alive_until_ms(self) -> int:
        """Until then nobody may take its operation."""
        return self.renewed_ms + HEARTBEAT_TIMEOUT_MS


class Worker(Process):
    """A worker: it starts what the broker delivers, keeps it alive and settles it, by production's statements."""

    def __init__(self, service: Service, number: int) -> None:
        super().__init__(service.world, f"{service.name}-worker-{number}")
        self.service = service
        self.number = number
        self.bodies: list[Body] = []
        self.unacknowledged: list[Attempt] = []
        """Whose messages the broker delivers again, should this die now."""
        self.acting: Attempt | None = None
        """Whose row it may write at the moment."""
        self.ending = ""
        """How the body ended that it settles at the moment."""
        self._attempts = Attempts(SimulatedDatabase(service.slot), client_tables())
        self._losses = Losses(
            client_tables(), losses_max=service.settings.max_worker_losses, encode=lambda text: Ending(error=text)
        )

    @property
    def _heartbeat_ms(self) -> int:
        """Its interval, by a clock that may be slow."""
        return round(HEARTBEAT_INTERVAL_MS / self.rate)

    def receive(self, message: Delivery) -> None:
        """A message arrives."""
        token = f"{self.world.rng.getrandbits(64):016x}"
        attempt = Attempt(message.id, message.generation, message.attempt, token, tells=self.world.tells)
        body = Body(self, attempt, self.world.clock.now_ms)
        self.unacknowledged.append(attempt)
        self.at(1, lambda: self._begin(body))

    def _acknowledge(self, attempt: Attempt) -> None:
        crashpoint("worker.message", "before_acknowledge")
        self.unacknowledged.remove(attempt)
        crashpoint("worker.message", "after_acknowledge")

    def freeze(self) -> None:
        """SIGSTOP: its bodies stand still, and so do their heartbeats."""
        super().freeze()
        for body in self.bodies:
            body.hindered = "froze"

    def _write(self, attempt: Attempt, write: Callable[[], Any]) -> Any:
        self.acting = attempt
        try:
            return write()
        finally:
            self.world.look()
            self.acting, self.ending = None, ""

    def _begin(self, body: Body) -> None:
        world, attempt = self.world, body.attempt
        world.runs.tried(body)
        try:
            if attempt in self.unacknowledged:
                self._acknowledge(attempt)
            started = self._write(
                attempt,
                lambda: self._attempts.start(attempt, worker=self.name, timeout_ms=HEARTBEAT_TIMEOUT_MS),
            )
        except OperationalError:
            self.at(200, lambda: self._begin(body))
            return
        if started is None:
            world.runs.refused(body)
            world.note("worker", self.name, "drops", attempt.id, attempt.attempt)
            return
        world.note("worker", self.name, "starts", attempt.id, attempt.attempt, attempt.token)
        body.started, body.renewed_ms = True, world.clock.now_ms
        self.bodies.append(body)
        world.runs.started(body)
        if started.cancel_requested:
            body.ending = "cancel"
        self.at(self._heartbeat_ms, lambda: self._beat(body))
        self.at(world.draw_duration(), lambda: self._end(body))

    def _beat(self, body: Body) -> None:
        if body.over:
            return
        begun_ms = self.world.clock.now_ms
        if (begun_ms - body.renewed_ms) * self.rate >= HEARTBEAT_TIMEOUT_MS and self.world.rng.random() < 0.5:
            self._stop(body)
            return
        try:
            beat = self._write(
                body.attempt,
                lambda: self._attempts.beat(body.attempt.id, body.attempt.token, timeout_ms=HEARTBEAT_TIMEOUT_MS),
            )
        except OperationalError:
            body.hindered = "cut off"
            self.at(500, lambda: self._beat(body))
            return
        if beat is None:
            self._stop(body)
            return
        had_lapsed, body.renewed_ms, body.hindered = begun_ms >= body.alive_until_ms, begun_ms, None
        if had_lapsed:
            self.world.runs.bound()
        if beat.cancel_requested:
            body.ending = "cancel"
            self._end(body)
            return
        self.at(self._heartbeat_ms, lambda: self._beat(body))

    def _stop(self, body: Body) -> None:
        """It is not this run's any more: the body is told to stop, and settles nothing."""
        body.over = True
        self.bodies.remove(body)
        self.world.note("worker", self.name, "stops", body.attempt.id, body.attempt.attempt)

    def _end(self, body: Body) -> None:
        if body.over:
            return
        body.returned = True
        body.ending = body.ending or self.world.draw_ending()
        if body.ending == "revoke":
            self.world.cancelled.add(body.attempt.id)
        self.ending = body.ending
        try:
            state = self._write(body.attempt, lambda: self._settle(body))
            body.settled = True
        except OperationalError:
            body.hindered = "cut off"
            self.at(200, lambda: self._end(body))
            return
        except AlreadySettled:
            self.world.stats["settles refused"] += 1
            state = "refused"
        body.over = True
        self.bodies.remove(body)
        self.world.note("worker", self.name, body.ending, body.attempt.id, body.attempt.attempt, state)
        self.service.poke()
        if body.settled and state in ENDED_STATES and body.attempt.tells:
            self._tell(body.attempt, state)

    def _tell(self, attempt: Attempt, state: str) -> None:
        """Tells the app's result backend; where it does not come to that, a dispatcher does."""
        if self.world.draw_silence():
            return
        with suppress(ConnectionError):
            self.service.tell(attempt.id, state)
            self.at(1_000, lambda: self._told(Mark(attempt.id, attempt.generation)))

    def _told(self, mark: Mark) -> None:
        with suppress(OperationalError):  # one that stays is told again
            self._attempts.told([mark])

    def _settle(self, body: Body) -> str:
        attempts, attempt = self._attempts, body.attempt
        match body.ending:
            case "succeed":
                return attempts.succeed(attempt, _RESULT)
            case "fail":
                return attempts.fail(attempt, Ending(error="simulated"))
            case "cancel":
                return attempts.cancel(attempt, Ending())
            case "lose":
                return attempts.lose(attempt, "simulated", self._losses)
            case "revoke":
                return attempts.revoke(attempt, Ending(error="simulated"))
            case "repeat":
                return attempts.repeat(attempt, Ending())
            case "retry":
                return attempts.retry(attempt, _again(attempt, 500), Ending(error="simulated"), requeue=False)
            case _:
                message = _again(attempt, REQUEUE_AFTER_MS)
                return attempts.retry(attempt, message, Ending(error="simulated"), requeue=True)


def _again(attempt: Attempt, delay_ms: int) -> CapturedMessage:
    return CapturedMessage(
        id=attempt.id,
        task="task",
        body=b"[[], {}, {}]",
        content_type="application/json",
        content_encoding="utf-8",
        digest=attempt.id,
        headers={"task": "task"},
        properties={},
        publish={},
        queue="celery",
        eta_delay_ms=delay_ms,
        expires_delay_ms=None,
        priority=0,
        retries=attempt.attempt,
    )
