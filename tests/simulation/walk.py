"""A seeded random walk over both cores: ``python -m tests.simulation.walk --seed N`` replays one, ``--seeds N`` many.

One ``random.Random(seed)`` decides everything, in virtual time, so that a seed always gives the same log. Faults last
for a while; then they stop, and all that waits must run. One seed in five is without faults.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from celery_durable.permits.messages import MAX_INT, AccountReport, Declared, Forfeit, Message, Pause, Resume, SetLimit
from holder_service import semaphore
from holder_service.footprint import held
from tests.invariants import Invariants, InvariantViolation, Pair
from tests.simulation.world import ACCOUNT, ClientShell, HolderShell, Operation, read_reply, reads

START_MS = 1_000_000
SETTLE_MS = 3_600_000
"""How long after faults stopped all must have run, besides twice the work that is left: some of the longest repeats."""
PASSED_OVER_MAX = 600


@dataclass(frozen=True)
class Weather:
    """What goes wrong, as probabilities and longest times."""

    loss: float = 0.0
    double: float = 0.0
    slow: float = 0.0
    slow_ms: int = 40_000
    rollback: float = 0.0


@dataclass
class Link:
    """An outbox slot: a newer message replaces one that is not sent yet."""

    body: bytes | None = None
    going: bool = False


@dataclass
class Walk:
    """One run of one seed."""

    seed: int
    rng: random.Random = field(init=False)
    now_ms: int = START_MS
    events: list[tuple[int, int, Callable[[], None]]] = field(default_factory=list)
    log: hashlib._Hash = field(default_factory=hashlib.sha256)
    lines: list[str] | None = None
    invariants: Invariants = field(default_factory=Invariants)
    stats: Counter[str] = field(default_factory=Counter)
    _number: int = 0

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.quiet = self.seed % 5 == 0
        self.weather = (
            Weather()
            if self.quiet
            else Weather(
                loss=rng.choice((0.0, 0.1, 0.25)),
                double=rng.choice((0.0, 0.1, 0.3)),
                slow=rng.choice((0.0, 0.1, 0.5)),
                rollback=rng.choice((0.0, 0.05)),
            )
        )
        self.groups = ["", "wf-1", "wf-2"][: rng.randint(1, 3)]
        declared_limit = rng.randint(1, 6)
        group_limit = rng.choice((None, None, 1, 2))
        self.clients = {
            name: ClientShell(name, self.invariants, Declared(limit=declared_limit, group_limit=group_limit))
            for name in ["a", "b", "c"][: rng.randint(1, 3)]
        }
        self.holder = HolderShell(self.invariants, self.now_ms)
        self.alive = set(self.clients)
        self.cut_off: set[str] = set()
        self.forfeited: set[str] = set()
        self.links: dict[str, Link] = {}
        self.topic: list[bytes] = []
        self.inbox: list[bytes] = []
        self.snapshot: str | None = None
        self.allowed = 0
        self.allowed_groups: dict[str, int] = {}
        self.command_seq = 0
        self.durations = rng.choice(((20, 60), (20, 3_000), (1_000, 60_000)))
        self.faults_end_ms = self.now_ms + rng.choice((60_000, 300_000, 900_000, 2_000_000))
        self.work_left = rng.choice((20, 60, 120))

    # -- the clockwork

    def at(self, delay_ms: int, event: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self.events, (self.now_ms + delay_ms, self._number, event))

    def note(self, *what: object) -> None:
        line = f"{self.now_ms - START_MS} {' '.join(str(part) for part in what)}"
        self.log.update(line.encode() + b"\n")
        if self.lines is not None:
            self.lines.append(line)

    def run(self) -> str:
        """Runs the seed to its end. Returns the hash of its log. Raises InvariantViolation."""
        self.at(0, self.arrive)
        if not self.quiet:
            self.at(self.rng.randint(1_000, 60_000), self.fault)
        self.at(self.rng.randint(1_000, 60_000), self.operate)
        while self.now_ms < self.faults_end_ms:
            self.step()
        self.settle()
        deadline_ms = self.now_ms + SETTLE_MS + 2 * self.work_ms()
        while self.events and not self.is_done():
            self.step()
            if self.now_ms > deadline_ms:
                break
        rows = [name for name in sorted(self.alive) if self.clients[name].row is not None]
        rows += [] if self.only_the_dead() else ["holder"]
        self.invariants.quiet(
            sum(self.holder.footprints().values()),
            sum(self.in_use().values()),
            sum(len(rows) for name in self.alive for rows in self.clients[name].waiting.values()),
            rows,
        )
        return self.log.hexdigest()

    def step(self) -> None:
        if not self.events:
            self.now_ms = self.faults_end_ms
            return
        at_ms, _, event = heapq.heappop(self.events)
        self.now_ms = max(self.now_ms, at_ms)
        event()

    def is_done(self) -> bool:
        idle = all(
            self.clients[name].row is None
            and not self.clients[name].running
            and not any(self.clients[name].waiting.values())
            for name in self.alive
        )
        if not idle or self.work_left:
            return False
        return self.only_the_dead() and not any((*self.holder.footprints().values(), *self.in_use().values()))

    def only_the_dead(self) -> bool:
        """Of a client that is gone for ever the row is kept: it may still come back."""
        return not set(self.holder.state().clients) & self.alive

    # -- operations

    def arrive(self) -> None:
        """A few operations of one client and group; then a short pause, or one long enough for rows to go."""
        if not self.alive:
            self.work_left = 0
        if not self.work_left:
            return
        client = self.clients[self.rng.choice(sorted(self.alive))]
        group = self.rng.choice(self.groups)
        for _ in range(min(self.work_left, self.rng.choice((1, 1, 1, 2, 5, 12)))):
            self.work_left -= 1
            self.stats["enqueued"] += 1
            self.enqueue(client, group)
        self.at(self.rng.choice((1, 50, 400, 3_000, 10_000, 45_000)), self.arrive)

    def enqueue(self, client: ClientShell, group: str) -> None:
        self._number += 1
        client.waiting[group].append(Operation(self._number, group, self.now_ms, self.rng.randint(*self.durations)))
        self.wake(client)

    def wake(self, client: ClientShell) -> None:
        self.at(self.rng.choice((0, 1, 5, 50)), lambda: self.client_pass(client))

    def end(self, client: ClientShell, operation: Operation) -> None:
        if client.name not in self.alive or client.running.pop(operation.number, None) is None:
            return
        self.stats["ran"] += 1
        if self.rng.random() < 0.05 and not self.is_settling():
            self.enqueue(client, operation.group)
        self.wake(client)

    def work_ms(self) -> int:
        """How long all that is left would take one after the other."""
        rows = [
            rows for client in self.clients.values() for rows in (*client.waiting.values(), client.running.values())
        ]
        return sum(operation.duration_ms for each in rows for operation in each) + self.work_left * self.durations[1]

    def in_use(self) -> dict[Pair, int]:
        return {
            (name, group): count
            for name, client in self.clients.items()
            if name not in self.forfeited
            for group, count in client.in_use().items()
        }

    # -- the client

    def client_pass(self, client: ClientShell, body: bytes | None = None) -> None:
        if client.name not in self.alive:
            return
        if body is None and client.row is None and not client.running and not any(client.waiting.values()):
            return
        if self.happens(self.weather.rollback):
            self.wake(client)
            return
        reply = None if body is None else read_reply(body)
        report, admitted = client.run_pass(self.now_ms, reply, self.unlocked)
        self.note("pass", client.name, body, client.row, report, [operation.number for operation in admitted])
        for operation in admitted:
            self.at(operation.duration_ms, lambda operation=operation: self.end(client, operation))
        if admitted:
            self.check_bound()
            if self.quiet:
                self.check_fairness(client, admitted)
        if report is not None:
            self.stats["reports"] += 1
            self.stage(f"report {client.name}", report, self.receive, keep=True)
        self.alarm(client)

    def unlocked(self, _group: str, most: int) -> int:
        return self.rng.randint(0, most) if self.happens(self.weather.rollback) else most

    def alarm(self, client: ClientShell) -> None:
        due_at_ms = client.due_at_ms
        if due_at_ms is not None:
            self.at(
                max(1, due_at_ms - self.now_ms),
                lambda: self.client_pass(client) if client.due_at_ms == due_at_ms else None,
            )
        if any(client.waiting.values()) and self.happens(self.weather.rollback):
            self.wake(client)

    # -- Kafka

    def stage(
        self, slot: str, body: bytes, receive: Callable[[bytes], None], *, keep: bool, sure: bool = False
    ) -> None:
        link = self.links.setdefault(slot, Link())
        link.body = body
        if not link.going:
            link.going = True
            who = slot.partition(" ")[2]
            self.at(self.rng.choice((1, 5, 20)), lambda: self.send(link, who, receive, keep=keep, sure=sure))

    def send(self, link: Link, who: str, receive: Callable[[bytes], None], *, keep: bool, sure: bool) -> None:
        body, link.body, link.going = link.body, None, False
        if body is None:
            return
        if not sure and (who in self.cut_off or self.happens(self.weather.loss)):
            self.stats["lost"] += 1
            return
        if keep:
            self.topic.append(body)
        copies = 1 + self.happens(self.weather.double) + (2 if self.happens(self.weather.double / 4) else 0)
        for _ in range(copies):
            delay_ms = self.rng.randint(1, 50)
            if self.happens(self.weather.slow):
                delay_ms = self.rng.randint(50, self.weather.slow_ms)
            self.at(delay_ms, lambda: receive(body))

    def happens(self, probability: float) -> bool:
        return probability > 0 and not self.is_settling() and self.rng.random() < probability

    # -- the holder

    def receive(self, body: bytes) -> None:
        self.inbox.append(body)
        if len(self.inbox) == 1:
            self.at(self.rng.choice((0, 2, 20)), self.holder_pass)

    def holder_pass(self) -> None:
        if self.happens(self.weather.rollback):
            self.at(50, self.holder_pass)
            return
        bodies, self.inbox = self.inbox, []
        self.decide(bodies)

    def decide(self, bodies: Sequence[bytes]) -> None:
        messages = [reads(body) for body in bodies]
        decision = self.holder.decide(messages, self.now_ms)
        assert not decision.refusals, decision.refusals
        replies = [(reply, reply.to_bytes()) for reply in decision.replies]
        self.note("decide", bodies, self.holder.row, [body for _, body in replies])
        for message in messages:
            if isinstance(message, Forfeit):
                self.forfeited.add(message.client)
        self.follow_limits(decision.state)
        if not self.holder.rebuilding:
            self.check_cover(decision.state)
        for reply, body in replies:
            client = self.clients[reply.client_id]
            self.stats["replies"] += 1
            self.stage(
                f"reply {client.name}",
                body,
                lambda body, client=client: self.client_pass(client, body),
                keep=False,
            )
        due_at_ms = self.holder.due_at_ms
        if due_at_ms is not None:
            self.at(
                max(1, due_at_ms - self.now_ms),
                lambda: self.decide(()) if self.holder.due_at_ms == due_at_ms else None,
            )

    def rebuild(self) -> None:
        """Reads the topic from its start to the end that it has now. What was under way comes again later."""
        self.links = {slot: link for slot, link in self.links.items() if not slot.startswith("reply")}
        bodies = list(self.topic)
        while bodies:
            size = self.rng.randint(1, 40)
            batch, bodies = bodies[:size], bodies[size:]
            self.decide(batch)
        self.holder.rebuilding = False
        if self.holder.row is not None:
            self.decide(())

    # -- what must hold

    def follow_limits(self, state: semaphore.AccountState) -> None:
        """The limits that bind: a lowered one does so only once what is given fits; it revokes nothing."""
        settings = self.holder.settings
        limit = semaphore.limit_in_force(state, settings).limit
        sure = not state.waits_for_epoch and not self.holder.rebuilding
        footprints = self.holder.footprints()
        fits = sure and sum(footprints.values()) <= limit
        self.allowed = limit if fits else max(self.allowed, limit)
        limit_of = semaphore.group_limits_in_force(state, settings)
        for group in self.groups:
            of_group = limit_of(group)
            bound = MAX_INT if of_group is None else of_group
            given = sum(count for (_, name), count in footprints.items() if name == group)
            before = self.allowed_groups.get(group, 0)
            self.allowed_groups[group] = bound if sure and given <= bound else max(before, bound)

    def check_bound(self) -> None:
        self.invariants.bound(self.in_use(), self.allowed, self.allowed_groups)
        if not self.holder.state().waits_for_epoch and not self.holder.rebuilding:
            self.check_cover(self.holder.state())

    def check_cover(self, state: semaphore.AccountState) -> None:
        if not state.waits_for_epoch:
            self.invariants.covers(self.holder.footprints(), self.in_use())

    def check_fairness(self, client: ClientShell, admitted: list[Operation]) -> None:
        waiting = {
            (name, group)
            for name, other in self.clients.items()
            for group, rows in other.waiting.items()
            if rows and self.holder.state().group_limits.get(group) != 0
        }
        for operation in admitted:
            self.invariants.admitted((client.name, operation.group), waiting, most=PASSED_OVER_MAX)

    # -- people and faults

    def command(self, message: type[Message], **values: object) -> None:
        """A command goes through an outbox of its own slot: it is late or doubled, never lost."""
        self.command_seq += 1
        command = message(client_id="ops", account=ACCOUNT, seq=self.command_seq, by="walk", **values)
        self.stage(
            f"command {message.__name__} {self.command_seq}", command.to_bytes(), self.receive, keep=True, sure=True
        )

    def operate(self) -> None:
        if self.is_settling():
            return
        match self.rng.randint(0, 5):
            case 0 | 1:
                self.command(SetLimit, limit=self.rng.choice((None, 0, 1, 1, 2, 3, 5, 8)))
            case 2:
                limit = self.rng.choice((None, 0, 1, 2, 3))
                self.command(SetLimit, group=self.rng.choice(self.groups), limit=limit)
            case 3:
                self.command(Pause)
                self.at(self.rng.randint(100, 60_000), lambda: self.command(Resume))
            case 4:
                for client in self.clients.values():
                    for rows in client.waiting.values():
                        if rows and client.name in self.alive:
                            rows.pop(self.rng.randrange(len(rows)))
                            self.wake(client)
            case _:
                pass
        self.at(self.rng.randint(1_000, 120_000), self.operate)

    def fault(self) -> None:
        if self.is_settling():
            return
        kind = self.rng.randint(0, 9)
        if kind <= 2 and self.is_whole(self.topic):
            self.note("the holder's database is lost")
            self.stats["databases lost"] += 1
            self.holder.lose_database(max(self.now_ms, self.holder.epoch + 1))
            self.rebuild()
        elif kind == 3 and self.is_whole(self.topic):
            self.note("the holder's database went back")
            self.stats["databases gone back"] += 1
            self.holder.go_back(self.snapshot, max(self.now_ms, self.holder.epoch + 1))
            self.rebuild()
        elif kind == 4:
            self.snapshot = self.holder.row
        elif kind == 5:
            self.note("the topic is lost")
            self.stats["topics lost"] += 1
            self.topic.clear()
        elif kind == 6 and len(self.alive) > 1:
            name = self.rng.choice(sorted(self.alive))
            self.kill(name)
        elif kind == 7:
            name = self.rng.choice(sorted(self.clients))
            self.note("cut off", name)
            self.stats["cut off"] += 1
            self.cut_off.add(name)
            self.at(self.rng.randint(1_000, 1_500_000), lambda: self.cut_off.discard(name))
        self.at(self.rng.randint(1_000, 180_000), self.fault)

    def is_whole(self, topic: list[bytes]) -> bool:
        """Whether a rebuild can know: of every client that may hold something, the topic has a report."""
        seen = {message.client_id for message in map(reads, topic) if isinstance(message, AccountReport)}
        commands = {message.seq for message in map(reads, topic) if isinstance(message, Forfeit)}
        holding = {name for name, client in self.clients.items() if client.row is not None} - self.forfeited
        return holding <= seen and len(commands) >= len(self.forfeited)

    def kill(self, name: str) -> None:
        """The service is gone for ever. Its permits count until an operator forfeits them."""
        self.note("killed", name)
        self.stats["killed"] += 1
        self.alive.discard(name)
        self.at(self.rng.randint(1_000, 1_500_000), lambda: self.forfeit(name))

    def forfeit(self, name: str) -> None:
        if name not in self.forfeited:
            self.command(Forfeit, client=name, epoch=MAX_INT, version=MAX_INT)

    def holds(self, name: str) -> bool:
        """Whether the holder counts something for the client that no claim window ends."""
        client = self.holder.state().clients.get(name)
        if client is None or client.forfeited:
            return False
        return client.unknown or any(held(pair) for pair in client.pairs.values())

    def is_settling(self) -> bool:
        return self.now_ms >= self.faults_end_ms

    def settle(self) -> None:
        """Faults stop: limits that let everything through, no pause, and the dead are forfeited."""
        self.note("settling")
        self.cut_off.clear()
        self.command(Resume)
        self.command(SetLimit, limit=self.rng.randint(1, 3))
        for group in self.groups:
            self.command(SetLimit, group=group, limit=None)
        # What was under way may still speak for a dead client, which then counts again: the operator says it twice.
        for delay_ms in (1, 60_000):
            self.at(delay_ms, self.forfeit_the_dead)

    def forfeit_the_dead(self) -> None:
        """One that may hold nothing needs no operator: its demand must not stop the others."""
        for name in sorted(set(self.clients) - self.alive):
            if self.holds(name) or (name not in self.forfeited and self.clients[name].in_use()):
                self.command(Forfeit, client=name, epoch=MAX_INT, version=MAX_INT)


def run(seed: int, *, verbose: bool = False) -> Walk:
    """Runs one seed; a violation tells the command that replays it."""
    walk = Walk(seed, lines=[] if verbose else None)
    try:
        walk.run()
    except AssertionError as error:
        if walk.lines is not None:
            print("\n".join(walk.lines))
        raise InvariantViolation(f"{error}\nreplay: python -m tests.simulation.walk --seed {seed}") from error
    return walk


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this one, with its log")
    parser.add_argument("--seeds", type=int, default=1_000, help="how many to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--keep-going", action="store_true", help="count all that fail")
    parser.add_argument("--mutation", default="", help="a seeded violation, from tests.simulation.mutations")
    options = parser.parse_args()
    from tests.simulation.mutations import broken

    begun = time.monotonic()
    stats: Counter[str] = Counter()
    looked: Counter[str] = Counter()
    failed = []
    with broken(options.mutation):
        if options.seed is not None:
            walk = run(options.seed, verbose=True)
            print("\n".join(walk.lines or ()))
            print(walk.log.hexdigest(), dict(walk.stats))
            return 0
        for seed in range(options.first, options.first + options.seeds):
            try:
                walk = run(seed)
            except InvariantViolation as error:
                failed.append(seed)
                print(f"seed {seed}: {error}", flush=True)
                if not options.keep_going:
                    return 1
                continue
            stats.update(walk.stats)
            looked.update(walk.invariants.looked)
    print(f"{options.seeds} seeds in {time.monotonic() - begun:.1f} s, {len(failed)} failed")
    print(dict(stats), dict(looked), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
