"""How long each kind of loss stops work, one at a time on an otherwise quiet system: ``make recovery-times``.

It prints the figures of docs/guarantees.md, section "Recovery times", and fails where a bound that is promised there
does not hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from rich.console import Console
from rich.table import Table

from celery_durable.runtime import runtime_of
from tests.chaos.figures import p50
from tests.e2e.observe import operation
from tests.harness import REPOSITORY, Kafka, Process, Service, Stack, wait_until
from tests.kafka_parts import partition_of
from tests.services import KafkaBroker, PostgreSQL, Redis, start_kafka

HEARTBEAT_TIMEOUT_S = 4.0
SESSION_TIMEOUT_S = 6.0
BEYOND_S = 2.0
"""What detection and delivery may add to a timeout."""
LEASED_WAIT_S = 2.0
"""What no operation under a lease may wait while holders or Kafka are away."""
_EVERY_S = 0.1
_READY_S = 60.0

MEMBERS = {
    "consumer": {"group.protocol": "consumer"},
    "classic, cooperative-sticky": {"partition.assignment.strategy": "cooperative-sticky"},
    "classic, range": {"partition.assignment.strategy": "range"},
}
_CLASSIC = {"session.timeout.ms": round(SESSION_TIMEOUT_S * 1000), "heartbeat.interval.ms": 1_500}


@dataclass
class Figure:
    """Measured times of one kind, in seconds, and what none may exceed (None: nothing is promised)."""

    name: str
    seconds: list[float] = field(default_factory=list)
    bound_s: float | None = None
    before_s: list[float] = field(default_factory=list)
    """What the same took right before, with nothing lost: the machine's own part in each."""

    @property
    def holds(self) -> bool:
        """Whether something was measured, and nothing exceeds the bound."""
        return bool(self.seconds) and (self.bound_s is None or max(self.seconds) <= self.bound_s)

    @property
    def holds_on_a_busy_machine(self) -> bool:
        """The same of what the loss alone has cost."""
        own = [after - before for after, before in zip(self.seconds, self.before_s, strict=True)]
        return bool(own) and (self.bound_s is None or max(own) <= self.bound_s)

    def add(self, before_s: float, after_s: float) -> None:
        """One measurement."""
        self.before_s.append(before_s)
        self.seconds.append(after_s)


@dataclass
class Rig:
    """Servers, and one stack on them at a time.

    :param postgresql: URL of a server.
    :param redis: address of a server, without a database.
    :param numbers: its free databases.
    """

    folder: Path
    postgresql: str
    kafka: Kafka
    redis: str
    numbers: Iterator[int]

    @contextmanager
    def stack(self, name: str) -> Iterator[Stack]:
        """A fresh stack, under topics of its own."""
        folder = self.folder / name
        folder.mkdir(parents=True)
        kafka = replace(self.kafka, topic_prefix=Kafka.new_prefix())
        with Stack(folder, kafka=kafka, postgresql=self.postgresql, redis=(self.redis, self.numbers)) as stack:
            yield stack


class Stream(threading.Thread):
    """Operations that need no new permit, one every 0.1 s, on an account with a lease and without an account."""

    def __init__(self, service: Service) -> None:
        super().__init__(name="stream", daemon=True)
        self._service = service
        self._stopping = threading.Event()
        self._sent: dict[str, list[tuple[str, int]]] = {"leased": [], "plain": []}

    def run(self) -> None:
        """The thread's body."""
        while not self._stopping.wait(_EVERY_S):
            for lane, result in (
                ("leased", self._service.task("work").delay("warm:leased", 0)),
                ("plain", self._service.task("add").delay(1, 2)),
            ):
                self._sent[lane].append((result.id, time.monotonic_ns()))

    def until(self, count: int) -> None:
        """Waits until so many of each lane have started: it flows."""

        def flows() -> bool:
            started = {record.operation_id for record in self._service.records()}
            return all(sum(name in started for name, _ in list(lane)) >= count for lane in self._sent.values())

        wait_until(flows, _READY_S, what=f"{count} operations of the stream")

    def stop(self) -> dict[str, float]:
        """Ends it, waits until all has run, and returns the longest wait of each lane in seconds."""
        self._stopping.set()
        self.join(30)

        def starts() -> dict[str, int] | None:
            found = {record.operation_id: record.time_ns for record in self._service.records()}
            return found if all(name in found for lane in self._sent.values() for name, _ in lane) else None

        first = wait_until(starts, _READY_S, what="what the stream enqueued")
        return {
            lane: max((first[name] - sent_ns) / 1e9 for name, sent_ns in calls) for lane, calls in self._sent.items()
        }


def lost_workers(rig: Rig, times: int, rng: random.Random) -> Figure:
    """A worker is killed in mid-task, at any moment between two heartbeats; the other one is idle."""
    figure = Figure("a killed worker's operation runs again", bound_s=HEARTBEAT_TIMEOUT_S + BEYOND_S)
    with rig.stack("workers") as stack:
        service = stack.service(poll_max_ms=250, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S)
        stack.holder(poll_max_ms=250)
        service.dispatcher()
        workers = [service.worker(label=f"worker{number}", concurrency=1) for number in range(2)]
        for number in range(times):
            flag = service.folder / f"flag{number}"
            sent_ns = time.monotonic_ns()
            lost = service.task("until").delay(f"lost:{number}", str(flag))
            before_s = (_starts(service, lost.id, 1)[0] - sent_ns) / 1e9
            time.sleep(rng.uniform(0, 1.5))  # so that it is killed at any moment between two heartbeats
            index = next(
                i
                for i, worker in enumerate(workers)
                if operation(service, lost.id).worker.startswith(f"{worker.label}@")
            )
            killed_ns = time.monotonic_ns()
            workers[index].kill()
            figure.add(before_s, (_starts(service, lost.id, 2)[1] - killed_ns) / 1e9)
            flag.touch()
            lost.get(timeout=_READY_S)
            workers[index] = service.worker(label=f"worker{number + 2}", concurrency=1)
    return figure


def lost_holders(rig: Rig, protocol: str, times: int) -> list[Figure]:
    """One of two holders is killed: operations on unseen accounts of every partition, and a stream under a lease."""
    bound_s = SESSION_TIMEOUT_S + BEYOND_S if protocol == "consumer" else None
    moves = Figure(f"holder lost ({protocol}): waiting operations move again, in every partition", bound_s=bound_s)
    leased = Figure(f"holder lost ({protocol}): longest wait under a lease", bound_s=LEASED_WAIT_S)
    with rig.stack(f"holders-{protocol}") as stack:
        settings: dict[str, Any] = {"kafka_group_protocol": protocol, "poll_max_ms": 250}
        service = stack.service(idle_return_s=300.0, **settings)
        holders = [stack.holder(label=f"holder{number}", **settings) for number in range(2)]
        service.dispatcher()
        service.worker(concurrency=4)
        group = stack.holder_env(**settings)["HOLDER_GROUP_ID"]
        for number in range(times):
            _shared_by(rig.kafka, group, 2)
            service.task("work").delay("warm:leased", 0).get(timeout=_READY_S)
            waits, spans = [], []
            for lost in (False, True):
                stream = Stream(service)
                stream.start()
                stream.until(10)
                begun_ns = time.monotonic_ns()
                if lost:
                    holders[number % 2].kill()
                accounts = _one_a_partition(service, f"{number}-{lost}")
                names = [service.task("work").delay(account, 0).id for account in accounts]
                spans.append(max((_starts(service, name, 1)[0] - begun_ns) / 1e9 for name in names))
                waits.append(stream.stop()["leased"])
            moves.add(*spans)
            leased.add(*waits)
            holders[number % 2] = stack.holder(label=f"holder{number + 2}", **settings)
    return [moves, leased]


def lost_kafka(rig: Rig, broker: KafkaBroker, away_s: float) -> list[Figure]:
    """Kafka, the rig's, is killed, and started again after ``away_s``."""
    leased = Figure(f"Kafka away for {away_s:g} s: longest wait under a lease", bound_s=LEASED_WAIT_S)
    plain = Figure(f"Kafka away for {away_s:g} s: longest wait without an account", bound_s=LEASED_WAIT_S)
    again = Figure(f"Kafka away for {away_s:g} s: a new permit after it answers again")
    with rig.stack("kafka") as stack:
        service = stack.service(idle_return_s=300.0, poll_max_ms=250)
        stack.holder(poll_max_ms=250)
        service.dispatcher()
        service.worker(concurrency=4)
        service.task("work").delay("warm:leased", 0).get(timeout=_READY_S)
        stream = Stream(service)
        stream.start()
        stream.until(30)
        before = stream.stop()
        stream = Stream(service)
        stream.start()
        broker.kill()
        waiting = service.task("work").delay("cold:unseen", 0)
        time.sleep(away_s)  # the fault itself
        assert operation(service, waiting.id).state == "queued"
        broker.start()
        answers_ns = time.monotonic_ns()
        again.seconds.append((_starts(service, waiting.id, 1, 120)[0] - answers_ns) / 1e9)
        waits = stream.stop()
    leased.add(before["leased"], waits["leased"])
    plain.add(before["plain"], waits["plain"])
    return [leased, plain, again]


def lost_members(rig: Rig, times: int) -> list[Figure]:
    """What of it is Kafka's own: a bare member of a group is killed, until the other one has all partitions."""
    figures = []
    for name, strategy in MEMBERS.items():
        settings = strategy if name == "consumer" else {**strategy, **_CLASSIC}
        figure = Figure(f"Kafka alone ({name}): the other member has the partitions")
        topic = f"members-{Kafka.new_prefix()}"
        rig.kafka.create_topics({topic: 12})
        folder = rig.folder / topic
        folder.mkdir()
        members = [_member(rig.kafka, topic, settings, folder / f"{number}.log") for number in range(2)]
        try:
            for number in range(times):
                first, second = members[number % 2], members[(number + 1) % 2]
                _own(members, 6)
                _shared_by(rig.kafka, f"{topic}-group", 2)
                killed_s = time.monotonic()
                first.kill()
                _own([second], 12)
                figure.seconds.append(time.monotonic() - killed_s)
                members[number % 2] = _member(rig.kafka, topic, settings, folder / f"{number + 2}.log")
        finally:
            for member in members:
                member.kill()
        figures.append(figure)
    return figures


def _member(kafka: Kafka, topic: str, settings: dict[str, Any], log: Path) -> Process:
    words = [kafka.bootstrap_servers, f"{topic}-group", topic, json.dumps(settings)]
    process = Process(
        log.stem, [sys.executable, "-m", "tests.chaos.member", *words], folder=log.parent, env={}, cwd=REPOSITORY
    )
    process.start()
    return process


def _own(members: Sequence[Process], partitions: int) -> None:
    """Waits until each has so many."""

    def owned() -> bool:
        return all(member.log_tail(1) == str(partitions) for member in members)

    wait_until(owned, _READY_S, what=f"{partitions} partitions each")


def _starts(service: Service, operation_id: str, count: int, deadline_s: float = _READY_S) -> list[int]:
    def look() -> list[int] | None:
        found = [
            record.time_ns
            for record in service.records()
            if record.event == "start" and record.operation_id == operation_id
        ]
        return found if len(found) >= count else None

    return wait_until(look, deadline_s, what=f"start {count} of {operation_id}")


def _one_a_partition(service: Service, word: str) -> list[str]:
    """Accounts that nobody has seen, one in each partition."""
    settings = runtime_of(service.app).settings
    admin = AdminClient({"bootstrap.servers": settings.kafka_bootstrap_servers})
    partitions = len(admin.list_topics(settings.accounts_topic, timeout=10).topics[settings.accounts_topic].partitions)
    found: dict[int, str] = {}
    for attempt in itertools.count():
        if len(found) == partitions:
            return list(found.values())
        account = f"cold:{word}-{attempt}"
        found.setdefault(partition_of(account, partitions), account)
    raise AssertionError("count never ends")


def _shared_by(kafka: Kafka, group: str, members: int) -> None:
    """Waits until so many members of the group have partitions, and nothing moves."""
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})

    def shared() -> bool:
        with suppress(KafkaException):
            found = admin.describe_consumer_groups([group], request_timeout=5)[group].result(6)
            owned = [len(member.assignment.topic_partitions) for member in found.members]
            return found.state.name == "STABLE" and len(owned) == members and min(owned) > 0
        return False

    wait_until(shared, _READY_S, what=f"{members} members of {group}")


def measure(folder: Path, *, times: int, kafka_away_s: float, parts: Sequence[str], seed: int = 0) -> list[Figure]:
    """All figures, on servers of its own."""
    rng = random.Random(seed)
    figures: list[Figure] = []
    broker = start_kafka(mock=False, external=False)
    try:
        with PostgreSQL() as postgresql, Redis() as redis:
            address = redis.url().rpartition("/")[0]
            kafka = Kafka(broker.bootstrap_servers, broker.kind)
            rig = Rig(folder, postgresql.url(), kafka, address, itertools.count(1))
            if "worker" in parts:
                figures.append(lost_workers(rig, times, rng))
            if "holder" in parts:
                for protocol in ("consumer", "classic"):
                    figures += lost_holders(rig, protocol, times)
            if "members" in parts:
                figures += lost_members(rig, times)
            if "kafka" in parts:
                figures += lost_kafka(rig, broker, kafka_away_s)
    finally:
        broker.stop()
    return figures


def show(console: Console, figures: Sequence[Figure]) -> None:
    """Prints one table."""
    table = Table(title="Recovery times, in seconds", title_justify="left")
    table.add_column("what", overflow="fold")
    for name in ("times", "p50", "worst", "promised", "nothing lost: worst"):
        table.add_column(name, justify="right")
    for figure in figures:
        middle = p50(figure.seconds)
        worst = "" if middle is None else f"{max(figure.seconds):.2f}"
        bound = "" if figure.bound_s is None else f"{figure.bound_s:g}" + ("" if figure.holds else "  BROKEN")
        before = f"{max(figure.before_s):.2f}" if figure.before_s else ""
        row = (str(len(figure.seconds)), "" if middle is None else f"{middle:.2f}", worst, bound, before)
        table.add_row(figure.name, *row)
    console.print(table)


PARTS = ("worker", "holder", "members", "kafka")


def main() -> int:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.recovery_times", description=__doc__)
    parser.add_argument("--times", type=int, default=10, help="how often each is measured")
    parser.add_argument("--kafka-away-s", type=float, default=60.0)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this; may be repeated")
    words = parser.parse_args()
    folder = Path(mkdtemp(prefix="celery-durable-recovery-"))
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    figures = measure(folder, times=words.times, kafka_away_s=words.kafka_away_s, parts=words.part or PARTS)
    show(console, figures)
    return 0 if all(figure.holds for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
