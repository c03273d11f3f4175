"""Processes of the simulator: what production code would run in threads, stepped one at a time in virtual time.

A process dies by a :class:`Crash` that a crash point raises, or between two steps. From then on its database refuses
it, as it would a process that is not there, so nothing on the way out is committed. It is made anew by its owner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from confluent_kafka import KafkaException
from sqlalchemy.exc import OperationalError

from celery_durable.dispatcher.publisher import BrokerUnavailable
from celery_durable.scheduling.loop import ERROR_PAUSE_MIN_S
from celery_durable.store.offsets import OffsetMoved
from holder_service.store import VersionMoved
from holder_service.topic import KafkaUnavailable

if TYPE_CHECKING:
    from tests.simulation.kafka import SimulatedConsumer
    from tests.simulation.shells import World

EXPECTED = (OperationalError, KafkaException, KafkaUnavailable, BrokerUnavailable, OffsetMoved, VersionMoved)
"""What a step may raise where the surroundings fail; a loop then backs off. Anything else is a fault of the code."""

_FUSED = {"crash": "_commit", "unsure": ".after_commit", "error": ".before_commit"}


class Crash(BaseException):
    """The process at work died here."""


class Process:
    """One process: alive, frozen or dead."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.rate = world.draw_rate()
        self.alive = True
        self.frozen = False
        self.fuse: int | None = None
        """Crash points until something happens: ``crash``, ``unsure`` (an error after the commit) or ``error``."""
        self.fuse_kind = ""
        self.fuse_at_commits = False
        """Only commits count."""
        self.consumers: list[SimulatedConsumer] = []
        self.loop: SimulatedLoop | None = None
        """The loop at work."""
        self._deferred: list[Callable[[], None]] = []

    def at(self, delay_ms: int, work: Callable[[], None]) -> None:
        """Has the process do something later: once it thaws, if it is frozen then, and never if it is dead."""
        self.world.at(delay_ms, lambda: self._do(work))

    def _do(self, work: Callable[[], None]) -> None:
        if self.frozen:
            self._deferred.append(work)
        elif self.alive:
            self.run(work)

    def run(self, work: Callable[[], Any]) -> Any:
        """Does something now, as this process."""
        world = self.world
        outer, world.current = world.current, self
        clock = world.clock
        clock.slept_s, clock.rate = 0.0, self.rate
        try:
            return work()
        except Crash:
            self.alive = False
        finally:
            world.current = outer
            clock.rate = 1.0
            clock.slept_s = 0.0
            if not self.alive:
                world.died(self)
            world.look()
        return None

    def require_alive(self) -> None:
        """Ends what a dead process would still do on its way out."""
        if not self.alive:
            raise Crash(self.name)

    def kill(self) -> None:
        """SIGKILL between two steps."""
        if self.alive:
            self.alive = False
            self.world.died(self)

    def freeze(self) -> None:
        """SIGSTOP."""
        self.frozen = True

    def thaw(self) -> None:
        """SIGCONT."""
        self.frozen = False
        deferred, self._deferred = self._deferred, []
        for work in deferred:
            self.at(0, work)

    def crashpoint(self, name: str) -> None:
        """The process passes a crash point."""
        world = self.world
        world.stats[f"passed {name}"] += 1
        if name in world.doomed:
            world.doomed.discard(name)
            self._die_at(name)
        if self.fuse is None or (self.fuse_at_commits and not name.endswith(_FUSED[self.fuse_kind])):
            return
        self.fuse -= 1
        if self.fuse > 0:
            return
        kind, self.fuse, self.fuse_kind = self.fuse_kind, None, ""
        if kind == "crash":
            self._die_at(name)
        world.stats[f"{kind} at {name}"] += 1
        world.note("fault", self.name, "gets an error at", name)
        raise OperationalError("simulated", None, Exception(f"connection lost at {name}"))

    def _die_at(self, name: str) -> NoReturn:
        self.world.stats[f"crash at {name}"] += 1
        self.world.note("fault", self.name, "dies at", name)
        self.alive = False
        raise Crash(name)


class SimulatedLoop:
    """In place of :class:`celery_durable.scheduling.loop.Loop`: the same pauses, without a thread."""

    def __init__(
        self,
        process: Process,
        name: str,
        step: Callable[[], float | None],
        *,
        pause_min_s: float,
        pause_max_s: float,
        error_pause_max_s: float = 5.0,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self.process = process
        self.name = name
        self._step = step
        self._pause_min_s = pause_min_s
        self._pause_max_s = pause_max_s
        self._error_pause_max_s = error_pause_max_s
        self._idle_s = pause_min_s
        self._error_s = ERROR_PAUSE_MIN_S
        self._number = 0
        self._waits_until_ms = 0
        self._pausing = False
        self.stopping = False

    def start(self) -> None:
        """Begins to step."""
        self._schedule(self.process.world.rng.randint(1, 20))

    def wake(self) -> None:
        """Ends the pause."""
        if self._pausing:
            self._idle_s = self._pause_min_s
            self._pausing = False
            self._schedule(max(1, self._waits_until_ms - self.process.world.clock.now_ms))

    def interrupt(self) -> None:
        """Ends the wait inside the step: a message came, or the group changed."""
        now_ms = self.process.world.clock.now_ms
        if self._waits_until_ms > now_ms:
            self._waits_until_ms = now_ms
            if not self._pausing:
                self._schedule(1)

    def stop(self) -> None:
        """No step any more."""
        self.stopping = True
        self._number += 1

    def _schedule(self, delay_ms: int) -> None:
        self._number += 1
        number = self._number
        self.process.at(delay_ms, lambda: self._fire(number))

    def _fire(self, number: int) -> None:
        if number != self._number or self.stopping:
            return
        process, world = self.process, self.process.world
        process.loop, self._pausing = self, False
        world.stats["steps"] += 1
        try:
            due_s = self._step()
        except EXPECTED as error:
            world.note("loop", process.name, self.name, type(error).__name__)
            self._waits_until_ms = world.clock.now_ms
            self._schedule(round(self._error_s * 1000))
            self._error_s = min(self._error_pause_max_s, self._error_s * 2)
            return
        finally:
            process.loop = None
        self._error_s = ERROR_PAUSE_MIN_S
        slept_ms = round(world.clock.slept_s * 1000)
        self._waits_until_ms = world.clock.now_ms + slept_ms
        if due_s is None:
            self._idle_s = self._pause_min_s
            self._schedule(max(1, slept_ms))
            return
        pause_s = max(0.0, min(self._idle_s, due_s))
        self._idle_s = min(self._pause_max_s, self._idle_s * 2)
        self._schedule(max(1, slept_ms + round(pause_s * 1000)))
        self._pausing = True
