"""Puts the simulator below production code: in place of threads, Kafka, Celery's broker and the clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any
from unittest.mock import patch

from sqlalchemy import Connection

from celery_durable import crashpoints
from celery_durable.dispatcher import delivery, main, passes, recovery, replies, retention, telling
from celery_durable.dispatcher.publisher import BrokerUnavailable
from celery_durable.kafka import client, relay
from celery_durable.kafka.consumer import Batch
from celery_durable.kafka.received import Received
from celery_durable.monitoring import events
from celery_durable.permits import queue
from celery_durable.permits.queue import Outcome, Plan
from celery_durable.store import attempts, losses
from celery_durable.store.delivery import Outbound
from holder_service import allocation, footprint, rebuild, semaphore, service, store, topic
from holder_service import main as holder_main
from holder_service.account import Client, Entry, Pair
from holder_service.store import HolderTables, Write
from tests.invariants import InvariantViolation
from tests.simulation.clock import virtual_time
from tests.simulation.databases import holder_slot
from tests.simulation.kafka import SimulatedAdmin, SimulatedConsumer, SimulatedProducer
from tests.simulation.processes import SimulatedLoop
from tests.simulation.shells import World

VERSIONS = "SELECT account, version FROM holder_accounts"
OFFSETS = "SELECT topic_id, partition, next_offset FROM holder_offsets"
IDLE_S = {"retention": 10.0, "events": 60.0}
"""Pauses of loops that find nothing in a run, in seconds."""
_move_offsets = service.Service._advance
_write_rows = store.write_rows
_void = passes.Passes.restored
_show = footprint.show
_read_to_end = rebuild.read_to_end


class _Run:
    """The run at hand."""

    world: World


def use(world: World) -> None:
    """Makes this run the one that production code is in."""
    _Run.world = world


def world() -> World:
    """The run at hand."""
    return _Run.world


def _process() -> Any:
    process = _Run.world.current
    assert process is not None, "production code was called outside of any process"
    return process


def _finish(plan: Plan, admitted: Mapping[str, int], counts: Any, now_ms: int, core: Any) -> Outcome:
    """The end of a pass, and what must hold of each claim in it."""
    outcome = queue.finish(plan, admitted, counts, now_ms, core)
    for group, number in admitted.items():
        if number:
            given = plan.state.groups[group]
            try:
                _Run.world.invariants.claim(
                    (core.client_id, group),
                    in_use=counts[group].in_use + number,
                    permits=given.permits,
                    claimed=outcome.state.groups[group].claimed,
                    claims=given.claims,
                )
            except InvariantViolation as error:  # a pass would take it for a fault of one account, and go on
                _Run.world.broken = error
    return outcome


def _restored(self: passes.Passes, connection: Connection) -> None:
    """A database that was restored voids what it was given, what it had acknowledged too."""
    _void(self, connection)
    _Run.world.checks.voided(_process().service)


def _advance(self: service.Service, connection: Connection, batches: Sequence[Batch]) -> None:
    """A batch's offsets move, and what must hold of where it began."""
    known = {(topic_id, number): offset for topic_id, number, offset in holder_slot().rows(OFFSETS)}
    _move_offsets(self, connection, batches)
    for batch in batches:
        place = (batch.new.topic_id, batch.partition)
        if _Run.world.bus.topics[batch.new.topic].topic_id != batch.new.topic_id:
            continue  # made anew a moment ago: its reader learns so within 10 s
        _Run.world.invariants.read_once(f"partition {place}", batch.messages[0].offset, known.get(place, 0))


def _write(connection: Connection, tables: HolderTables, writes: Sequence[Write]) -> None:
    """A holder's accounts are written, and what must hold of the versions at which it read them."""
    known = dict(holder_slot().rows(VERSIONS))
    _write_rows(connection, tables, writes)
    for write in writes:
        _Run.world.invariants.at_its_version(write.account, write.old_version, known.get(write.account))


def _show_one_shot(client: Client, pair: Pair, version: int, permits: int, turn_ms: int | None = None) -> None:
    """What a pair is given, in runs with ceilings: no more claims than it has permits free."""
    profile, newest = _Run.world.profile, pair.newest
    if profile is None or not profile.ceilings:
        _show(client, pair, version, permits, turn_ms)
        return
    claims = newest.claims if permits <= newest.permits else pair.claimed + max(0, permits - pair.used)
    if (newest.permits, newest.claims, newest.turn_ms) != (permits, claims, turn_ms):
        footprint.show_anew(client, pair, version, permits, turn_ms)
        pair.entries[-1] = Entry(version, permits, claims, turn_ms)


def _make_loop(name: str, step: Callable[[], float | None], **pauses: Any) -> SimulatedLoop:
    pauses["pause_min_s"] = IDLE_S.get(name, pauses["pause_min_s"])
    return SimulatedLoop(_process(), name, step, **pauses)


def _make_producer(_settings: Any) -> SimulatedProducer:
    return SimulatedProducer(_Run.world.bus)


def _make_consumer(_settings: Any, group_id: str, **more: Any) -> SimulatedConsumer:
    process, world = _process(), _Run.world
    loop = process.loop
    wake = loop.interrupt if loop is not None else lambda: None
    consumer = SimulatedConsumer(world.bus, world.groups_of_kafka, group_id, wake, lambda: process.alive)
    consumer.partition_eof = bool(more.get("enable.partition.eof"))
    process.consumers.append(consumer)
    return consumer


def _make_admin(_settings: Any) -> SimulatedAdmin:
    return SimulatedAdmin(_Run.world.bus)


def _crashpoint(name: str) -> None:
    world = _Run.world
    if world.current is not None:
        world.current.crashpoint(name)


class SimulatedEvents:
    """In place of what sends Celery's events: a broker that may be away, and workers that live."""

    def __init__(self, service: Any) -> None:
        self._service = service

    def send(self, _event: Any) -> None:
        """Sends one."""
        crashpoints.crashpoint("events.message", "before_publish")
        if self._service.world.broker_is_down:
            raise BrokerUnavailable("simulated: the broker is down")
        crashpoints.crashpoint("events.message", "after_publish")

    def lives(self, _workers: Sequence[str]) -> dict[str, Any]:
        """No worker answers."""
        return {}

    def any_worker(self) -> str | None:
        """The name of one that lives."""
        return next((worker.name for worker in self._service.workers if worker.alive), None)

    def close(self) -> None:
        """Disconnects."""


def _make_events(app: Any) -> Callable[[], float | None]:
    if not _Run.world.announces:
        return lambda: float("inf")
    return events.Events(app._celery_durable_runtime, SimulatedEvents(app.service), asks=True).step


def _read_to_end_slowly(settings: Any, name: str) -> Iterator[Received]:
    for received in _read_to_end(settings, name):
        _Run.world.hinder_rebuild(slow=1.0 if name == settings.limits_topic else 0.2)
        yield received


class SimulatedPublisher:
    """In place of the publisher to Celery's broker."""

    def __init__(self, app: Any, *, deadline_s: float) -> None:
        self._service = app.service

    def connect(self) -> None:
        """Connects."""
        if self._service.world.broker_is_down:
            raise BrokerUnavailable("simulated: the broker is down")

    together_max = 1

    def publish(self, some: Sequence[Outbound]) -> list[Any]:
        """Sends one message."""
        (outbound,) = some
        crashpoints.crashpoint("delivery.message", "before_publish")
        self.connect()
        world = self._service.world
        fails = world.happens(world.weather.broker_error)
        if not fails or world.rng.random() < 0.5:
            self._service.deliver(outbound)
        if fails:
            raise BrokerUnavailable("simulated: the connection to the broker is lost")
        crashpoints.crashpoint("delivery.message", "after_publish")
        return []

    def close(self) -> None:
        """Disconnects."""


def _cached(make: Callable[..., Any]) -> Callable[..., Any]:
    """Statements are built once and shared: they have no state."""
    return lru_cache(maxsize=None)(make)


@contextmanager
def simulated() -> Iterator[None]:
    """Production code runs in the simulator meanwhile. Once for many seeds."""
    statements = [
        (passes, "Accounts"),
        (passes, "Admission"),
        (recovery, "Recoveries"),
        (recovery, "Untold"),
        (telling, "Untold"),
        (losses, "_overdue"),
        (retention, "Recoveries"),
        (delivery, "Deliveries"),
        (main, "Watch"),
        (attempts, "AttemptStatements"),
        (events, "EventRows"),
    ]
    with ExitStack() as stack:

        def put(module: Any, name: str, value: Any) -> None:
            stack.enter_context(patch.object(module, name, value))

        stack.enter_context(virtual_time())
        for module, name in statements:
            put(module, name, _cached(getattr(module, name)))
        for module in (main, holder_main):
            put(module, "Loop", _make_loop)
        for module, names in (
            (client, ("make_producer", "make_consumer", "make_admin")),
            (topic, ("make_consumer", "make_admin")),
        ):
            for name in names:
                put(
                    module,
                    name,
                    {"make_producer": _make_producer, "make_consumer": _make_consumer}.get(name, _make_admin),
                )
        put(passes, "finish", _finish)
        put(passes.Passes, "restored", _restored)
        put(service.Service, "_advance", _advance)
        put(store, "write_rows", _write)
        for module in (allocation, semaphore):
            put(module, "show", _show_one_shot)
        put(events, "make_step", _make_events)
        put(rebuild, "read_to_end", _read_to_end_slowly)
        put(delivery, "Publisher", SimulatedPublisher)
        # Idle looks cost the simulator time and find nothing: hints and due times lead it.
        put(main, "LOOK_EVERY_S", 60.0)
        put(main, "AWAKE_S", 0.0)
        # Pauses that let work gather are for what it costs: here each is one event more.
        put(main, "BREATH_S", 0.0)
        put(passes, "REST", 0.0)
        put(delivery, "BREATH_S", 0.0)
        put(main, "UNHINTED_PAUSE_MAX_S", 10.0)
        put(replies, "READ_S", 5.0)
        put(relay, "REPORT_WAIT_S", 0.5)
        put(holder_main, "PAUSE_MIN_S", 2.0)
        put(service, "TIMERS_RECHECK_S", 5.0)
        crashpoints.arm(_crashpoint)
        stack.callback(crashpoints.arm, None)
        yield
