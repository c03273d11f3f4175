"""Holders that a test steps by itself, and clients that speak the protocol to them, on one Kafka and database."""

from __future__ import annotations

import contextlib
import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from sqlalchemy import func, select

from celery_durable.kafka.client import make_consumer, make_producer
from celery_durable.kafka.consumer import PartitionReader
from celery_durable.kafka.relay import Relay
from celery_durable.permits.messages import (
    AccountReply,
    AccountReport,
    Ack,
    Command,
    Declared,
    ReportGroup,
    read_reply,
)
from celery_durable.store import offsets
from celery_durable.store.database import Database
from celery_durable.store.migrate import migrate
from celery_durable.store.offsets import Position
from holder_service import commands, store
from holder_service.account import AccountState
from holder_service.footprint import footprint
from holder_service.migrations import HOLDER
from holder_service.service import Service
from holder_service.settings import HolderSettings, load
from holder_service.usage import Usage
from tests.harness import Kafka, wait_until
from tests.invariants import Invariants, InvariantViolation, Pair
from tests.kafka_parts import partition_of

T = TypeVar("T")
PARTITIONS = 4
"""Of the accounts topic: what the mock cluster makes too."""
DEADLINE_S = 60.0
"""Several members of one group take most of 30 s to share the partitions on a busy machine."""


class Rig:
    """One holder database and one set of topics; ``holder()`` makes an instance, ``client()`` a service."""

    def __init__(self, database_url: str, kafka: Kafka, *, makes_topics: bool = True, **settings: Any) -> None:
        self.kafka = kafka
        self.settings: HolderSettings = load(
            **{
                "database_url": database_url,
                "group_id": f"{kafka.topic_prefix}-holder",
                "poll_max_ms": 20,
                **kafka.settings,
                **settings,
            }
        )
        self.tables = store.build_tables()
        self.database = self.open(database_url)
        self.invariants = Invariants()
        self._life = 0
        self.stack = contextlib.ExitStack()
        self.stack.callback(self.database.dispose)
        names = (self.settings.limits_topic, self.settings.dead_letters_topic)
        if makes_topics:
            kafka.create_topics({self.settings.accounts_topic: PARTITIONS, **dict.fromkeys(names, 1)})

    def open(self, database_url: str) -> Database:
        """A migrated database."""
        database = Database(database_url)
        migrate(database, self.tables, migrations=HOLDER)
        return database

    def holder(self, **settings: Any) -> Instance:
        """A holder instance, which works only while it is stepped."""
        instance = Instance(self, **settings)
        self.stack.callback(instance.close)
        return instance

    def client(self, name: str, incarnation: str = "first") -> Client:
        """A service."""
        client = Client(self, name, incarnation)
        self.stack.callback(client.close)
        return client

    def usage(self, account: str) -> Usage | None:
        """What ``holder-service accounts`` shows of the account."""
        found = {each.account: each for each in commands.usages(self.database, self.tables, self.settings.semaphore())}
        return found.get(account)

    def look(self, clients: Sequence[Client], accounts: Sequence[str], *, limit: int) -> None:
        """What must hold of the accounts now: the bound, all that is in use is counted, and versions only grow."""
        with self.database.reading() as connection:
            rows = store.load_rows(connection, self.tables, accounts)
        for account in accounts:
            in_use = {
                (client.client_id, group): held.in_use
                for client in clients
                for group, held in client.view(account).groups.items()
            }
            self.invariants.bound(in_use, limit, {})
            row = rows.get(account)
            self.invariants.covers({} if row is None else _footprints(row.state), in_use)
            if row is not None:
                self.invariants.grows("version", f"{account} of database {self._life}", (row.version,))

    def give_back(self, clients: Sequence[Client]) -> Callable[[], bool]:
        """Has clients whose operations have all ended give back what they have. Returns: is nothing left?"""
        for client in clients:
            for account in list(client.views):
                client.report(account, gives_back=True)
        return partial(self._at_rest, clients)

    def _at_rest(self, clients: Sequence[Client]) -> bool:
        for client in clients:
            for account in sorted({reply.account for reply in client.pump() if reply.ack_wanted}):
                client.report(account, gives_back=True)
        usages = commands.usages(self.database, self.tables, self.settings.semaphore())
        groups = [held for client in clients for view in client.views.values() for held in view.groups.values()]
        left = [usage.account for usage in usages]
        try:
            self.invariants.quiet(
                sum(usage.footprint for usage in usages),
                sum(held.in_use for held in groups),
                sum(held.waiting for held in groups),
                [*left, "outbox"] if self.outbox_depth() else left,
            )
        except InvariantViolation:
            return False
        return True

    def outbox_depth(self) -> int:
        """Rows in the holder's outbox."""
        with self.database.reading() as connection:
            return int(connection.execute(select(func.count()).select_from(self.tables.outbox)).scalar_one())

    def snapshot(self) -> dict[str, list[Any]]:
        """A backup: every row of every table."""
        with self.database.reading() as connection:
            return {
                table.name: [dict(row._mapping) for row in connection.execute(select(table))]
                for table in self.tables.metadata.sorted_tables
            }

    def restore(self, backup: dict[str, list[Any]]) -> None:
        """Puts the database back to what it was. An empty backup: the database is lost, and was made anew."""
        self._life += 1
        with self.database.transaction() as connection:
            for table in self.tables.metadata.sorted_tables:
                connection.execute(table.delete())
                if backup.get(table.name):
                    connection.execute(table.insert(), backup[table.name])
            if not backup:
                connection.execute(self.tables.counters.insert().values(name=store.VERSION_COUNTER, value=0))

    def positions(self) -> dict[int, Position]:
        """The stored offsets of the accounts topic."""
        with self.database.reading() as connection:
            return offsets.load(connection, self.tables.offsets, self.settings.accounts_topic)

    def messages(self, topic: str) -> list[Any]:
        """Everything that the topic has now."""
        consumer = make_consumer(self.settings, f"look-{uuid.uuid4().hex}", **{"enable.partition.eof": True})
        try:
            partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
            consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
            found: list[Any] = []
            ended: set[int] = set()
            deadline = time.monotonic() + DEADLINE_S
            while len(ended) < len(partitions) and time.monotonic() < deadline:
                message = consumer.poll(0.1)
                if message is None:
                    continue
                if message.error() is None:
                    found.append(message)
                else:
                    ended.add(message.partition())
            return found
        finally:
            consumer.close()

    def close(self) -> None:
        """Ends everything."""
        self.stack.close()


class Instance:
    """One holder: its service and its relay, without threads."""

    def __init__(self, rig: Rig, **settings: Any) -> None:
        self.rig = rig
        own = rig.settings.model_copy(update=settings)
        self.database = Database(own.database_url.get_secret_value())
        self.service = Service(self.database, rig.tables, own, wake_relay=lambda: None)
        self.relay = Relay(self.database, rig.tables.outbox, own)
        self.sends = True
        self._open = True

    @property
    def reader(self) -> PartitionReader:
        """Its consumer."""
        assert self.service._reader is not None
        return self.service._reader

    def step(self) -> None:
        """One step of each loop."""
        try:
            self.service.step()
        except KafkaException:
            # A topic that was just made has no leader for a moment. The loop of a process tries again too.
            time.sleep(0.05)
        if self.sends and self.service.may_send:
            self.relay.step()

    def until(self, condition: Callable[[], T | None], what: str = "condition", deadline_s: float = DEADLINE_S) -> T:
        """Steps until ``condition`` returns something true."""
        deadline = time.monotonic() + deadline_s
        while True:
            if found := condition():
                return found
            assert time.monotonic() < deadline, f"not within {deadline_s:g} s: {what}"
            self.step()

    def serving(self) -> Instance:
        """Steps until it owns partitions."""
        self.until(lambda: self.service.partitions, "partitions")
        return self

    def crash(self) -> None:
        """Ends at once: nothing more is committed, sent or deleted. It leaves the group, so that no test waits long."""
        self._open = False
        self.service.close()
        self.database.dispose()

    def close(self) -> None:
        """Leaves the group."""
        if self._open:
            self._open = False
            self.service.close()
            self.relay.close()
            self.database.dispose()


@dataclass(slots=True)
class Held:
    """What a client knows of one group of one account."""

    claimed: int = 0
    released: int = 0
    waiting: int = 0
    permits: int = 0
    claims: int | None = None

    @property
    def in_use(self) -> int:
        """Operations that hold a permit."""
        return self.claimed - self.released


@dataclass(slots=True)
class View:
    """A client's account."""

    groups: dict[str, Held] = field(default_factory=dict)
    ack: Ack | None = None
    newest: AccountReply | None = None


class Client:
    """A service of the simplest kind that keeps the protocol: it reports, applies replies, claims and releases."""

    def __init__(self, rig: Rig, client_id: str, incarnation: str) -> None:
        self.client_id = client_id
        self.incarnation = incarnation
        self.seq = 0
        self.views: dict[str, View] = {}
        self.declared = Declared()
        self._rig = rig
        self._topic = rig.settings.accounts_topic
        self._replies = rig.settings.replies_topic(client_id)
        with contextlib.suppress(Exception):
            rig.kafka.create_topics({self._replies: 1})
        self._producer: Producer = make_producer(rig.settings)
        self._consumer: Consumer = make_consumer(rig.settings, f"{client_id}-{uuid.uuid4().hex}")
        partitions = wait_until(
            # The mock cluster makes the topic, and says so when it is asked again.
            lambda: self._producer.list_topics(self._replies, timeout=10).topics[self._replies].partitions,
            what=self._replies,
        )
        self._consumer.assign([TopicPartition(self._replies, number, 0) for number in partitions])
        self.replies: list[AccountReply] = []
        self.answered: dict[str, int] = {}

    def view(self, account: str) -> View:
        """What it knows of the account."""
        return self.views.setdefault(account, View())

    def group(self, account: str, group: str = "") -> Held:
        """What it knows of one group."""
        return self.view(account).groups.setdefault(group, Held())

    def report(
        self,
        account: str,
        waiting: int | None = None,
        group: str = "",
        *,
        gives_back: bool = False,
        partition: int | None = None,
    ) -> AccountReport:
        """Says what is so in ``account``, how many wait now, and whether it keeps only what is in use."""
        view, held = self.view(account), self.group(account, group)
        if waiting is not None:
            held.waiting = waiting
        if gives_back:
            held.permits = held.in_use
        self.seq += 1
        report = AccountReport(
            client_id=self.client_id,
            incarnation=self.incarnation,
            account=account,
            seq=self.seq,
            ack=view.ack,
            declared=self.declared,
            groups=tuple(
                ReportGroup(
                    group=name,
                    claimed=each.claimed,
                    released=each.released,
                    waiting=each.waiting,
                    keeps=each.permits if gives_back else None,
                )
                for name, each in view.groups.items()
            ),
        )
        self.send(account, report.to_bytes(), partition)
        return report

    def command(self, command: Command) -> None:
        """Sends a command."""
        self.send(command.account, command.to_bytes())

    def send(self, key: str | bytes, body: bytes, partition: int | None = None, topic: str | None = None) -> None:
        """Sends any bytes to the accounts topic, or another, and waits for Kafka's answer."""
        where: dict[str, Any] = {} if partition is None else {"partition": partition}
        self._producer.produce(topic or self._topic, key=key, value=body, **where)
        assert self._producer.flush(10) == 0

    def pump(self) -> list[AccountReply]:
        """Applies the replies that came."""
        came = []
        while (message := self._consumer.poll(0)) is not None:
            if message.error() is not None:
                continue
            reply = read_reply(message.value() or b"")
            came.append(reply)
            self.answered[reply.account] = max(reply.answers, self.answered.get(reply.account, 0))
            view = self.view(reply.account)
            if view.ack is not None and (reply.epoch, reply.version) <= (view.ack.epoch, view.ack.version):
                continue
            view.ack, view.newest = reply.ack, reply
            for held in view.groups.values():
                held.permits, held.claims = 0, None
            for group in reply.groups:
                held = self.group(reply.account, group.group)
                held.permits, held.claims = group.permits, group.claims
        self.replies += came
        return came

    def claim(self, account: str, group: str = "") -> bool:
        """Takes a permit for one waiting operation, if there is one."""
        held = self.group(account, group)
        ceiling = held.claims is not None and held.claimed >= held.claims
        if held.waiting == 0 or held.in_use >= held.permits or ceiling:
            return False
        held.claimed += 1
        held.waiting -= 1
        return True

    def release(self, account: str, group: str = "") -> None:
        """Ends one operation."""
        self.group(account, group).released += 1

    def try_to_claim(self, account: str) -> bool:
        """Applies what came, answers where asked to, and takes a permit if there is one."""
        came = [reply for reply in self.pump() if reply.account == account]
        if self.claim(account):
            self.report(account)
            return True
        if any(reply.ack_wanted for reply in came):
            self.report(account)
        return False

    def close(self) -> None:
        """Disconnects."""
        self._consumer.close()


@dataclass
class Race:
    """Clients that want the only permit of each account. Two at once in one account fail the test."""

    rig: Rig
    clients: Sequence[Client]
    accounts: Sequence[str]
    dice: random.Random
    in_use: dict[str, Client] = field(default_factory=dict)
    ended: list[tuple[str, str]] = field(default_factory=list)
    """(account, client) of each operation that has run."""

    def step(self) -> None:
        """Some that run end, everything that came is read, and who may begins."""
        for account in self.dice.sample(self.accounts, len(self.accounts)):
            owner = self.in_use.get(account)
            if owner is not None and self.dice.random() < 0.5:
                del self.in_use[account]
                owner.release(account)
                owner.report(account)
                self.ended.append((account, owner.client_id))
        for client in self.clients:
            asked = {reply.account for reply in client.pump() if reply.ack_wanted}
            for account in self.accounts:
                if client.claim(account):
                    self.rig.look(self.clients, [account], limit=1)
                    self.in_use[account] = client
                    asked.add(account)
            for account in sorted(asked):
                client.report(account)


def _footprints(state: AccountState) -> dict[Pair, int]:
    """What the holder counts for each pair."""
    return {
        (name, group): footprint(client, pair)
        for name, client in state.clients.items()
        for group, pair in client.pairs.items()
    }


def accounts_of_partition(partition: int, count: int = 1, partitions: int = PARTITIONS) -> list[str]:
    """Names of accounts that our partitioner puts into ``partition``."""
    return list(_take(_names(partition, partitions), count))


def _names(partition: int, partitions: int) -> Iterator[str]:
    number = 0
    while True:
        name = f"tenant:{number}"
        if partition_of(name, partitions) == partition:
            yield name
        number += 1


def _take(names: Iterator[str], count: int) -> Iterator[str]:
    for _ in range(count):
        yield next(names)
