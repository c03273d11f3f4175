"""The dispatcher: a service's background process. Any number may run for one database, and any may die at any time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from celery_durable.dispatcher.delivery import BREATH_S, Delivery
from celery_durable.dispatcher.passes import Passes
from celery_durable.dispatcher.recovery import Recovery
from celery_durable.dispatcher.replies import ReplyReader
from celery_durable.dispatcher.retention import LOOK_EVERY_S, Retention
from celery_durable.dispatcher.telling import Telling
from celery_durable.errors import ConfigurationError
from celery_durable.kafka.relay import Relay
from celery_durable.monitoring import events
from celery_durable.runtime import Runtime, runtime_of
from celery_durable.scheduling.loop import Loop, Step, quick_turns, stop_all
from celery_durable.scheduling.signals import signals_set
from celery_durable.store import migrate
from celery_durable.store.admission import Admitted
from celery_durable.store.bell import RING_EVERY_S, Listener
from celery_durable.store.watch import NOTHING, Watch

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger(__name__)


def run(app: Celery, *, stop: threading.Event | None = None) -> int:
    """Runs a dispatcher in the foreground until SIGTERM, SIGINT or ``stop``. Returns the exit code.

    It ends within ``shutdown_s``: what is under way then is found in the rows by another dispatcher or the next start.
    A Kafka or a broker that does not answer does not end it; missing settings and a schema that does not fit do.

    :raises ConfigurationError: a setting is missing or wrong, the schema does not fit (:class:`SchemaError`), or the
        database belongs to another ``client_id``.
    """
    runtime = runtime_of(app)
    runtime.database.end_standstills(runtime.settings.kafka_session_timeout_ms)
    _check(runtime)
    stop = threading.Event() if stop is None else stop
    dispatcher = Dispatcher(app, runtime)
    with signals_set(stop), quick_turns():
        dispatcher.start()
        logger.info("dispatcher of %s: started", runtime.settings.client_id)
        stop.wait()
        logger.info("dispatcher of %s: ending", runtime.settings.client_id)
        late = dispatcher.stop(runtime.settings.shutdown_s)
    if late:
        logger.warning("ended with work under way in: %s; it goes on from the rows", ", ".join(late))
    return 0


UNHINTED_PAUSE_MAX_S = 5.0
"""Longest pause of a loop that the watch hints: its own look is the net for a watch that fails."""
BUSY_MIN = 50
"""From so many operations on that were sent and have not started, workers are busy for longer than ``BREATH_S``."""
AWAKE_S = 5 * RING_EVERY_S
"""So long after it was rung or found something new the watch looks every ``poll_min_ms``."""


class Dispatcher:
    """The loops of one dispatcher, and the hints that they give each other. A lost hint costs one pause.

    The watch looks for the others, every ``poll_max_ms``: an idle dispatcher costs one statement then, not one a loop.
    It looks often for a while after the bell rang, or it found something new: most rings are left out then.
    """

    def __init__(self, app: Celery, runtime: Runtime) -> None:
        settings = runtime.settings
        self._runtime = runtime
        self._watch = Watch(runtime.tables)
        self._found = NOTHING
        self._awake_until_s = 0.0
        self._look_at_s = 0.0
        self._pace_s = settings.poll_min_ms / 1000
        self._delivery = Delivery(app, runtime, on_wakes=self._wake_passes)
        self._relay = Relay(runtime.database, runtime.tables.outbox, settings, batch_max=settings.relay_batch_max)
        # Each is for one thread.
        passes, of_replies = (Passes(runtime, hand_over=self._hand_over, on_staged=self._wake_relay) for _ in range(2))
        self._replies = ReplyReader(runtime, of_replies)
        recovery = Recovery(app, runtime, on_wakes=self._wake_passes, on_admitted=self._wake_delivery)

        def rest_s(took_s: float) -> float:
            return max(passes.rest_s(took_s), BREATH_S if self._delivery.under_way >= BUSY_MIN else 0.0)

        self._passes_loop = self._loop(
            "passes",
            _first(self._replies.check_restored, _paced(passes.step, rest_s)),
        )
        self._delivery_loop = self._loop("delivery", self._delivery.step)
        self._relay_loop = self._loop("relay", self._relay.step)
        self._recovery_loop = self._loop("recovery", recovery.step)
        watch_s = settings.poll_max_ms / 1000
        self._watch_loop = self._loop("watch", self._look, watch_s, watch_s)
        self._listener = Listener(runtime.database, runtime.tables)
        self._loops = [
            self._passes_loop,
            self._delivery_loop,
            self._relay_loop,
            self._recovery_loop,
            self._loop("replies", self._replies.step),
            self._loop("events", events.make_step(app)),
            self._loop("telling", Telling(app, runtime).step),
            self._loop("retention", Retention(runtime).step, 1.0, LOOK_EVERY_S),
            self._watch_loop,
        ]
        if runtime.database.dialect == "postgresql":
            self._loops.append(self._loop("bell", self._listen))

    def start(self) -> None:
        """Starts the loops, each in a thread of its own."""
        for loop in self._loops:
            loop.start()

    def stop(self, timeout_s: float) -> list[str]:
        """Ends the loops within ``timeout_s`` seconds; returns the names of those that had to be left."""
        deadline = time.monotonic() + timeout_s
        self._delivery.stop()
        late = stop_all(self._loops, timeout_s)
        closing = {"delivery": self._delivery.close, "relay": self._relay.close, "replies": self._replies.close}
        threads = [
            threading.Thread(target=close, name=f"{name}-close", daemon=True)
            for name, close in closing.items()
            if name not in late
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        late += [thread.name for thread in threads if thread.is_alive()]
        self._runtime.database.dispose()
        return late

    def _loop(self, name: str, step: Step, pause_min_s: float | None = None, pause_max_s: float | None = None) -> Loop:
        settings = self._runtime.settings
        return Loop(
            name,
            step,
            pause_min_s=self._pace_s if pause_min_s is None else pause_min_s,
            pause_max_s=max(UNHINTED_PAUSE_MAX_S, settings.poll_max_ms / 1000) if pause_max_s is None else pause_max_s,
            on_end=self._runtime.database.drop_held,
        )

    def _look(self) -> float:
        # It is woken more often than it needs to look: many processes may ring.
        pause_s = self._look_at_s - time.monotonic()
        if pause_s > 0:
            return pause_s
        self._look_at_s = time.monotonic() + self._pace_s
        with self._runtime.database.autocommit() as connection:
            pending = self._watch.look(connection)
        for is_pending, loop in (
            (pending.passes, self._passes_loop),
            (pending.delivery, self._delivery_loop),
            (pending.recovery, self._recovery_loop),
            (pending.relay, self._relay_loop),
        ):
            if is_pending:
                loop.wake()
        # What stays pending is somebody else's, or waits for a broker that is away.
        if pending not in (NOTHING, self._found):
            self._awake_until_s = time.monotonic() + AWAKE_S
        self._found = pending
        return self._pace_s if time.monotonic() < self._awake_until_s else float("inf")

    def _listen(self) -> None:
        rung = self._listener.wait()
        if "passes" in rung:
            self._wake_passes()
        if "delivery" in rung:
            self._wake_delivery()
        if rung:
            now_s = time.monotonic()
            self._awake_until_s = now_s + AWAKE_S
            if self._look_at_s < now_s:  # what it rang for is under way: the watch is for what comes after it
                self._look_at_s = now_s + self._pace_s
            self._watch_loop.wake()

    def _hand_over(self, admitted: Sequence[Admitted]) -> None:
        if admitted:
            self._delivery.hand_over(admitted)
            self._wake_delivery()

    def _wake_passes(self) -> None:
        self._passes_loop.wake()

    def _wake_delivery(self) -> None:
        self._delivery_loop.wake()

    def _wake_relay(self) -> None:
        self._relay_loop.wake()


def _first(once: Callable[[], object], step: Step) -> Step:
    """The step, and before the first one ``once``, again and again until it has ended without an error."""
    done = False

    def stepped() -> float | None:
        nonlocal done
        if done:
            return step()
        once()
        done = True
        return None

    return stepped


def _paced(step: Step, rest_s: Callable[[float], float]) -> Step:
    """The step, and a rest after each time that it did work.

    :param rest_s: from how long the step took.
    """
    again_at_s = 0.0

    def stepped() -> float | None:
        nonlocal again_at_s
        pause_s = again_at_s - time.monotonic()
        if pause_s > 0:
            return pause_s
        began_s = time.monotonic()
        due_s = step()
        if due_s is None:
            now_s = time.monotonic()
            again_at_s = now_s + rest_s(now_s - began_s)
        return due_s

    return stepped


def _check(runtime: Runtime) -> None:
    settings = runtime.settings
    if not settings.kafka_bootstrap_servers:
        raise ConfigurationError(
            "kafka_bootstrap_servers is empty: a dispatcher needs Kafka to ask the holder for permits; set "
            "CELERY_DURABLE_KAFKA_BOOTSTRAP_SERVERS=host:port, or use `durable up`, which brings its own"
        )
    migrate.check(runtime.database, runtime.tables)
