"""The seeded simulation of the real shells: dispatchers, relays, holders, workers' statements, on databases and a bus.

One ``random.Random(seed)`` decides everything, in virtual time and in one thread, so that a seed always gives the same
log. Faults last for a while; then they stop, and all that waits must run. One seed in five is without faults.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from celery_durable.permits.messages import AccountReport, read_account_message
from celery_durable.store.operations import NewOperation
from tests.invariants import Invariants, InvariantViolation
from tests.simulation import bus, clock, profiles, quiescence
from tests.simulation.bus import Bus, Stored
from tests.simulation.checks import Checks
from tests.simulation.clock import START_MS, Clock
from tests.simulation.databases import Slot, client_slot, holder_slot
from tests.simulation.holders import HolderProcess, Operator, holder_settings
from tests.simulation.kafka import Groups
from tests.simulation.processes import Process
from tests.simulation.runs import Runs
from tests.simulation.services import TOPIC_PREFIX, Service

if TYPE_CHECKING:
    from tests.simulation.faults import Faults

ACCOUNTS_TOPIC = f"{TOPIC_PREFIX}.accounts"
LIMITS_TOPIC = f"{TOPIC_PREFIX}.limits"
SETTLE_MS = 900_000
"""How long after faults stopped all must have run, besides what the work itself takes: some of the longest repeats."""
SLOW_S = 4.0
"""Longer than a rebuild goes on without saying that it lives."""
SLOTS = 4
SKEWS_MS = (0, 700, -700, 3_600_000, -3_600_000, 30 * 86_400_000, -30 * 86_400_000)
"""How far ahead of virtual time a database's clock may be."""
ENDINGS = ("succeed", "fail", "retry", "requeue", "repeat", "lose", "revoke"), (74, 5, 5, 4, 4, 5, 3)
"""How bodies end while there are faults, and how many in a hundred do."""
RACE = 10
"""Operations of each of two services that race for one permit."""


@dataclass(frozen=True, slots=True)
class Weather(bus.Weather):
    """What goes wrong with messages of Kafka and of Celery's broker, and with commits."""

    broker_loss: float = 0.0
    broker_double: float = 0.0
    broker_slow: float = 0.0
    broker_error: float = 0.0


class World:
    """One run of one seed."""

    def __init__(self, seed: int, *, lines: list[str] | None = None) -> None:
        self.seed = seed
        self.lines = lines
        self.rng = random.Random(seed)
        self.clock = Clock()
        clock.use(self.clock, self.rng)
        self.quiet = seed % 5 == 0
        self.log = hashlib.sha256()
        self.stats: Counter[str] = Counter()
        self.invariants = Invariants()
        self.current: Process | None = None
        self.errors: list[str] = []
        """What production code logged as an error, where it goes on."""
        self.broken: InvariantViolation | None = None
        """What a check found in the midst of production code, which would catch it."""
        self.services: list[Service] = []
        self.holders: list[HolderProcess] = []
        self.weather = Weather()
        self.broker_is_down = False
        self.doomed: set[str] = set()
        """Crash points at each of which the next process that passes it dies."""
        self.settling = False
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._number = 0
        self._operations = 0
        self._draw()
        self.bus = Bus(self.clock, self.rng, self.at, self.note, self._sent)
        self.groups_of_kafka = Groups(self.bus)
        self.checks = Checks(self)
        self.runs = Runs(self)
        self.operator = Operator(self, "operator")
        self.faults: Faults | None = None
        self.cancelled: set[str] = set()
        """Operations that a caller asked to cancel."""

    def _draw(self) -> None:
        """What this seed is like."""
        rng = self.rng
        self.accounts = ["tenant:acme", "tenant:bolt"][: 1 + (rng.random() < 0.25)]
        self.groups = ["", "wf-1", "wf-2"][: rng.choice((1, 1, 2, 3))]
        self.declared: dict[str, Any] = {"limit": rng.choice((1, 1, 2, 3, 5))}
        if rng.random() < 0.3:
            self.declared["group_limit"] = rng.choice((1, 2))
        self.resend_min_s = rng.choice((1.0, 3.0))
        self.holder_settings = holder_settings(rng.choice((60.0, 600.0)))
        self.semaphore_settings = self.holder_settings.semaphore()
        self.durations = rng.choice(((5, 60), (20, 1_500), (500, 9_000)))
        self.work_left = rng.choice((4, 6, 10))
        self.skewed = not self.quiet and rng.random() < 0.2
        self.service_count = rng.choice((1, 2, 2, 3))
        self.holder_count = rng.choice((1, 1, 2, 2, 3))
        self.races = self.quiet and rng.random() < 0.5
        if self.races:
            # Two services with as much to do each, for one permit: whoever is passed over is seen.
            self.accounts, self.groups, self.declared = self.accounts[:1], [""], {"limit": 1}
            self.durations, self.service_count, self.work_left = (5, 60), 2, 2 * RACE
        self.faults_end_ms = START_MS + (1_000 if self.quiet else rng.choice((6_000, 12_000, 20_000)))
        self.idle_return_s = 5.0
        self._clocks_are_right = rng.random() < 0.5
        self.announces = rng.random() < 0.1
        """Dispatchers send Celery's events."""
        self.tells = rng.random() < 0.3
        """The services' apps have a result backend of their own."""
        self.profile = profiles.of(self.seed)
        if self.profile is not None:
            self.profile.draw(self)

    # -- the clockwork

    def at(self, delay_ms: int, work: Callable[[], None]) -> None:
        """Does something later."""
        self._number += 1
        heapq.heappush(self._events, (self.clock.now_ms + delay_ms, self._number, work))

    def note(self, kind: str, *what: Any) -> None:
        """One line of the log."""
        at_ms = self.clock.now_ms - START_MS
        self.log.update(repr((at_ms, kind, what)).encode())
        if self.lines is not None:
            from tests.simulation.narrate import line

            self.lines.append(line(at_ms, kind, what))

    def run(self) -> str:
        """Runs the seed to its end. Returns the hash of its log. Raises InvariantViolation."""
        self.begin()
        while self.clock.now_ms < self.faults_end_ms or self.work_left:
            self._step()
        self.settling = True
        if self.faults is not None:
            self.faults.stop()
        settle_ms = None if self.profile is None else self.profile.settle_ms
        deadline_ms = self.clock.now_ms + (settle_ms or SETTLE_MS)
        while self.clock.now_ms < deadline_ms:
            if self.checks.changed:
                self.checks.changed = False
                if quiescence.holds(self.checks):
                    break
            self._step()
        quiescence.check(self.checks)
        self.stats["virtual s"] += (self.clock.now_ms - START_MS) // 1000
        return self.log.hexdigest()

    def advance(self, ms: int) -> None:
        """So much time passes, for a test that decides itself what happens."""
        until_ms = self.clock.now_ms + ms
        self.at(ms, lambda: None)
        while self.clock.now_ms < until_ms:
            self._step()

    def _step(self) -> None:
        at_ms, _, work = heapq.heappop(self._events)
        self.clock.now_ms = max(self.clock.now_ms, at_ms)
        work()
        if self.broken is not None:
            raise self.broken
        if self.errors:
            raise InvariantViolation(f"an error was logged: {self.errors[0]}")

    def begin(self) -> None:
        """Starts everything."""
        from tests.simulation.faults import Faults

        if not self.quiet:
            self.faults = Faults(self)
            if self.profile is None:
                self.faults.doom_first()
            elif self.profile.crashes_at:
                self.doomed.add(self.rng.choice(self.profile.crashes_at))
        for slot in (holder_slot(), *(client_slot(number) for number in range(SLOTS))):
            slot.load()
            slot.before_begin = self._before_begin
            slot.skew_ms = self.draw_skew_ms()
            if not self.quiet and self.rng.random() < 0.03:
                self._upgrade(slot)
        self.bus.create(ACCOUNTS_TOPIC, self.rng.choice((1, 2)))
        self.bus.create(LIMITS_TOPIC, 1)
        self.bus.create(f"{TOPIC_PREFIX}.dead-letters", 1)
        for number in range(self.service_count):
            self.add_service("abc"[number], "abc"[number], number)
        for number in range(self.holder_count):
            self.holders.append(HolderProcess(self, number))
        for service in self.services:
            self.launch(service)
        at_once = self.races or (self.profile is not None and self.profile.at_once)
        self.at(0, self._race if at_once else self._arrive)
        if self.faults is not None:
            self.faults.start()

    def _upgrade(self, slot: Slot) -> None:
        """Its tables are old, and brought up to date; who does it may die, and somebody does it again."""
        slot.load_oldest()
        upgraded = False
        while not upgraded:
            process = Process(self, "migrate")
            process.run(slot.migrate)
            upgraded = process.alive

    def add_service(self, name: str, client_id: str, slot: int) -> Service:
        """Makes a service; :meth:`launch` starts it."""
        service = Service(self, name, client_id, client_slot(slot))
        self.services.append(service)
        replies = f"{TOPIC_PREFIX}.replies.{client_id}"
        if replies not in self.bus.topics:
            self.bus.create(replies, self.rng.choice((1, 2)))
        return service

    def launch(self, service: Service) -> None:
        """Starts a service's processes."""
        service.identify()
        service.start(1 + (self.rng.random() < 0.35), 1 + (self.rng.random() < 0.6))

    def service(self, name: str) -> Service:
        """The service with this name."""
        return next(service for service in self.services if service.name == name)

    def _before_begin(self) -> None:
        if self.current is not None:
            self.current.require_alive()

    # -- operations

    def _arrive(self) -> None:
        """A few operations of one service, account and group; then a pause."""
        there = [service for service in self.services if not service.gone]
        if not there:
            self.work_left = 0
        if not self.work_left:
            return
        service = there[self.rng.randrange(len(there))]
        account = self.rng.choice(self.accounts)
        group = self.rng.choice(self.groups)
        number = min(self.work_left, self.rng.choice((1, 1, 2, 4, 8)))
        self.work_left -= number
        if number > 1 and self.rng.random() < 0.4:
            groups = [self.rng.choice(self.groups) for _ in range(number)]
            service.enqueue_many([self._call(service, account, one) for one in groups])
        else:
            for _ in range(number):
                self.enqueue(service, account, group)
        self.at(self.rng.choice((1, 50, 400, 2_000, 7_000)), self._arrive)

    def _race(self) -> None:
        """All at once."""
        while self.work_left:
            self.work_left -= 1
            self.enqueue(self.services[self.work_left % len(self.services)], self.accounts[0], "")

    def enqueue(self, service: Service, account: str, group: str) -> None:
        """One operation."""
        service.enqueue(self._call(service, account, group))

    def _call(self, service: Service, account: str, group: str) -> NewOperation:
        self._operations += 1
        self.stats["operations"] += 1
        eta_ms = self.rng.randint(100, 3_000) if not self.races and self.rng.random() < 0.1 else None
        key = f"{service.name}-{self._operations}"
        retention_ms = 1_000 if self._operations % 4 == 0 else None
        return service.call(key, account, group, eta_delay_ms=eta_ms, retention_ms=retention_ms)

    def draw_duration(self) -> int:
        """How long a body takes, in ms."""
        return self.rng.randint(*self.durations)

    def draw_ending(self) -> str:
        """How a body ends."""
        if self.settling or self.quiet:
            return "succeed"
        return self.rng.choices(*ENDINGS)[0]

    def draw_rate(self) -> float:
        """How fast a process's monotonic clock runs."""
        return self.rng.choice((0.7, 1.0, 1.5)) if self.skewed else 1.0

    def draw_skew_ms(self) -> int:
        """How wrong a database's clock is: in half of the seeds all are right."""
        return 0 if self.quiet or self._clocks_are_right else self.rng.choice(SKEWS_MS)

    def draw_silence(self) -> bool:
        """Whether a worker does not come to tell an end, or the app's result backend does not take it."""
        return not self.quiet and not self.settling and self.rng.random() < 0.3

    def draw_impatience(self) -> bool:
        """Whether the operator waits no longer for clients that have not acknowledged a new epoch."""
        return not self.quiet and self.rng.random() < 0.4

    def hinder_rebuild(self, *, slow: float) -> None:
        """A rebuild has read a message. It may have waited long for it, and somebody may end the process meanwhile.

        :param slow: the probability that it has waited.
        """
        process = self.current
        if self.quiet or self.settling or process is None or process.loop is None:
            return
        drawn = self.rng.random()
        if drawn < slow:
            self.clock.sleep(SLOW_S)
        elif drawn < slow + 0.03:
            process.loop.stop()
            process.at(0, process.kill)

    def happens(self, probability: float) -> bool:
        """Whether something of this probability happens now."""
        return probability > 0 and not self.settling and self.rng.random() < probability

    # -- what must hold

    def look(self) -> None:
        """Looks at what the step has committed."""
        self.checks.look()

    def _sent(self, topic: str, message: Stored) -> None:
        if topic == ACCOUNTS_TOPIC:
            document = json.loads(message.value)
            kind = document["type"] if document["type"] == "AccountReport" else "command"
            sender = f"{document['client_id']} {document.get('incarnation', '')} {kind} {document['seq']}"
            life = next((one.slot_life for one in self.services if one.client_id == document["client_id"]), 0)
            if any(one.copied_from is not None for one in self.services):
                return
            try:
                self.invariants.one_body(f"{sender} of database life {life}", message.value)
            except InvariantViolation as error:
                self.broken = error

    def topic_is_whole(self) -> bool:
        """Whether a rebuild can know: of every service that may hold something, the topic has a report."""
        seen = set()
        for log in self.bus.topics[ACCOUNTS_TOPIC].partitions:
            for stored in log.messages:
                message = read_account_message(stored.value)
                if isinstance(message, AccountReport):
                    seen.add((message.client_id, message.incarnation, message.account))
        return all(
            (service.client_id, service.incarnation(), account) in seen
            for service in self.services
            for account, _ in service.slot.rows("SELECT account, state FROM durable_accounts")
        )

    def kafka_back(self) -> None:
        """The cluster answers again."""
        self.bus.is_down = False
        for name, topic in self.bus.topics.items():
            for number in range(len(topic.partitions)):
                self.bus.announce(name, number)
        for group in self.groups_of_kafka.of.values():
            self.groups_of_kafka.rebalance(group)

    # -- processes

    def died(self, process: Process) -> None:
        """A process is gone. Its sessions end some time later, and whoever runs it starts another."""
        self.stats["died"] += 1
        self.note("fault", process.name, "is dead")
        for consumer in process.consumers:
            consumer.abandon()
            self.at(self.rng.choice((100, 3_000, 10_000)), consumer.expire)
        if self.faults is not None:
            self.faults.restart_later(process)
