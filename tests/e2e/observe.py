"""What tests of running services look at: rows, messages in Kafka, and what the tasks themselves recorded."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient  # type: ignore[attr-defined]
from sqlalchemy import func, select

from celery_durable.runtime import runtime_of
from celery_durable.store.database import Database
from celery_durable.store.schema import ENDED_STATES, PERMIT_STATES, SUCCEEDED
from holder_service.store import build_tables as build_holder_tables
from tests.harness import Kafka, Service, Stack, wait_until
from tests.invariants import Invariants, Pair

DEADLINE_S = 60.0


def rows(service: Service, table: str, *columns: str, **equal: Any) -> list[tuple[Any, ...]]:
    """The columns of the table's rows that have these values."""
    runtime = runtime_of(service.app)
    found = getattr(runtime.tables, table)
    statement = select(*(found.c[name] for name in columns))
    for name, value in equal.items():
        statement = statement.where(found.c[name] == value)
    with runtime.database.reading() as connection:
        return [tuple(row) for row in connection.execute(statement)]


def table_sizes(service: Service) -> dict[str, int]:
    """How many rows there are in each of the service's tables."""
    runtime = runtime_of(service.app)
    with runtime.database.reading() as connection:
        return {
            name: int(connection.scalar(select(func.count()).select_from(table)) or 0)
            for name, table in runtime.tables.metadata.tables.items()
        }


def states(service: Service, account: str | None = None) -> Counter[str]:
    """How many operations are in each state."""
    runtime = runtime_of(service.app)
    operations = runtime.tables.operations
    statement = select(operations.c.state, func.count()).group_by(operations.c.state)
    if account is not None:
        statement = statement.where(operations.c.account == account)
    with runtime.database.reading() as connection:
        return Counter({str(state): int(count) for state, count in connection.execute(statement)})


def operation(service: Service, operation_id: str) -> Any:
    """The operation's row."""
    runtime = runtime_of(service.app)
    operations = runtime.tables.operations
    with runtime.database.reading() as connection:
        return connection.execute(select(operations).where(operations.c.id == operation_id)).one()


def wait_ended(service: Service, account: str, count: int, deadline_s: float = DEADLINE_S) -> None:
    """Waits until the account has this many operations, and all have succeeded."""
    wait_until(
        lambda: states(service, account) == {SUCCEEDED: count},
        deadline_s,
        what=f"{count} operations of {account} succeeded in {service.name}",
    )


def in_use(service: Service) -> int:
    """Operations of any account that hold a permit."""
    runtime = runtime_of(service.app)
    operations = runtime.tables.operations
    holding = (operations.c.account.is_not(None), operations.c.state.in_(PERMIT_STATES))
    with runtime.database.reading() as connection:
        return int(connection.scalar(select(func.count()).select_from(operations).where(*holding)) or 0)


def outbox_depth(service: Service) -> int:
    """Messages that Kafka does not have yet."""
    return len(rows(service, "outbox", "no"))


def holder_rows(stack: Stack, table: str, *columns: str) -> list[tuple[Any, ...]]:
    """The columns of every row of one of the holder's tables."""
    database = Database(stack.holder_url)
    found = getattr(build_holder_tables(), table)
    try:
        with database.reading() as connection:
            return [tuple(row) for row in connection.execute(select(*(found.c[name] for name in columns)))]
    finally:
        database.dispose()


def holder_usage(stack: Stack, **settings: Any) -> dict[str, dict[str, Any]]:
    """What ``holder-service accounts`` shows, by account."""
    done = stack.holder_run("accounts", "--json", env=stack.holder_env(**settings))
    assert done.returncode == 0, done.stderr
    return {usage["account"]: usage for usage in json.loads(done.stdout)}


@dataclass(frozen=True)
class Letter:
    """One message in Kafka."""

    key: str
    body: bytes
    headers: Mapping[str, str]
    partition: int
    offset: int

    @property
    def document(self) -> dict[str, Any]:
        """The body as JSON."""
        found: dict[str, Any] = json.loads(self.body)
        return found


def _letter(message: Any) -> Letter:
    return Letter(
        (message.key() or b"").decode(errors="replace"),
        message.value() or b"",
        {name: (value or b"").decode() for name, value in message.headers() or ()},
        message.partition(),
        message.offset(),
    )


def read_topic(kafka: Kafka, topic: str, key: str | None = None) -> list[Letter]:
    """All that is in the topic now (with this key), each partition in its order."""
    consumer = Consumer(
        {
            "bootstrap.servers": kafka.bootstrap_servers,
            "group.id": f"test-{uuid.uuid4().hex}",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 5,
        }
    )
    letters: list[Letter] = []
    try:
        metadata = consumer.list_topics(topic, 10).topics[topic]
        ends = {
            partition: consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=10)
            for partition in metadata.partitions
        }
        left = {partition: high for partition, (low, high) in ends.items() if high > low}
        consumer.assign([TopicPartition(topic, partition, ends[partition][0]) for partition in left])

        def complete() -> bool:
            for message in consumer.consume(500, 0.05) if left else ():
                if message.error() is not None:
                    raise KafkaException(message.error())
                letter = _letter(message)
                letters.append(letter)
                if letter.offset + 1 >= left.get(letter.partition, 0):
                    left.pop(letter.partition, None)
            return not left

        wait_until(complete, DEADLINE_S, what=f"all of {topic}")
    finally:
        consumer.close()
    letters.sort(key=lambda letter: (letter.partition, letter.offset))
    return [letter for letter in letters if key is None or letter.key == key]


def topic_size(kafka: Kafka, topic: str) -> int:
    """How many messages were ever written to the topic, by its partitions' offsets."""
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": f"test-{uuid.uuid4().hex}"})
    try:
        partitions = consumer.list_topics(topic, 10).topics[topic].partitions
        return sum(consumer.get_watermark_offsets(TopicPartition(topic, one), timeout=10)[1] for one in partitions)
    finally:
        consumer.close()


def write_topic(kafka: Kafka, topic: str, letters: Iterable[tuple[str, bytes]], **options: Any) -> None:
    """Writes messages (key, body) as a service or a holder does, and waits until Kafka has them."""
    producer = Producer(
        {"bootstrap.servers": kafka.bootstrap_servers, "partitioner": "murmur2_random", "linger.ms": 0, **options}
    )
    errors: list[Any] = []

    def told(error: Any, _message: Any) -> None:
        if error is not None:
            errors.append(error)

    for key, body in letters:
        producer.produce(topic, body, key.encode(), on_delivery=told)
    assert producer.flush(30) == 0
    assert not errors, errors


def reports(service: Service, account: str) -> list[dict[str, Any]]:
    """The reports on the account that are in Kafka."""
    topic = runtime_of(service.app).settings.accounts_topic
    return [
        letter.document
        for letter in read_topic(service.stack.kafka, topic, account)
        if letter.document["type"] == "AccountReport" and letter.document["client_id"] == service.name
    ]


def replies(service: Service, account: str) -> list[dict[str, Any]]:
    """The replies to the service on the account that are in Kafka."""
    topic = runtime_of(service.app).settings.replies_topic(service.name)
    return [letter.document for letter in read_topic(service.stack.kafka, topic, account)]


def messages(service: Service, account: str) -> int:
    """How many messages the account has cost so far, both ways."""
    return len(reports(service, account)) + len(replies(service, account))


@dataclass
class History:
    """What the tasks recorded of their runs, in all services together.

    The bound is on operations, so a run that was lost, and has no end, ends where the next attempt starts.
    """

    services: Sequence[Service]
    looked: Invariants = field(default_factory=Invariants)

    def starts(self, account: str | None = None) -> Counter[str]:
        """How often each operation's body ran."""
        return Counter(
            record.operation_id
            for service in self.services
            for record in service.records()
            if record.event == "start" and account in (None, record.account)
        )

    def check_bound(
        self,
        limit: int | Callable[[str], int],
        group_limits: Mapping[str, int] | None = None,
        *,
        account: str | None = None,
        since_ns: int = 0,
    ) -> None:
        """No run ever started (from ``since_ns`` on) beyond the limit of its account, or of its group."""
        running: dict[str, dict[str, tuple[str, Pair]]] = {}
        events = sorted(
            ((record, service.name) for service in self.services for record in service.records()),
            key=lambda event: event[0].time_ns,
        )
        for record, client in events:
            if not record.account or account not in (None, record.account):
                continue
            now = running.setdefault(record.account, {})
            if record.event == "end":
                if now.get(record.operation_id, ("",))[0] == record.run:
                    del now[record.operation_id]
                continue
            now[record.operation_id] = (record.run, (client, record.group))
            if record.time_ns >= since_ns:
                used = Counter(pair for _, pair in now.values())
                most = limit if isinstance(limit, int) else limit(record.account)
                own = {name: most for name, most in (group_limits or {}).items() if name == record.group}
                self.looked.bound(used, most, own)
        self.looked.require("bound", *(["group bound"] if group_limits else []))


def permit_spans(service: Service) -> list[tuple[str, int, int]]:
    """(account, admitted, ended) of every operation that has ended, by the database's clock in ms."""
    found = rows(service, "operations", "account", "state", "admitted_at", "ended_at")
    return [
        (account, admitted, ended)
        for account, state, admitted, ended in found
        if account is not None and state in ENDED_STATES and admitted is not None
    ]


def set_topic_config(kafka: Kafka, topic: str, **values: str) -> None:
    """Changes settings of a topic of a real Kafka; dots in their names are given as ``_``."""
    from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource  # type: ignore[attr-defined]

    entries = [
        ConfigEntry(name.replace("_", "."), value, incremental_operation=AlterConfigOpType.SET)
        for name, value in values.items()
    ]
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=entries)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(30)


def all_read(service: Service) -> bool:
    """Whether holder and service have read everything that is in Kafka for them, and have nothing more to send."""
    stack, settings = service.stack, runtime_of(service.app).settings
    read = dict.fromkeys((settings.accounts_topic, settings.replies_topic(service.name)), 0)
    for topic, offset in (
        *holder_rows(stack, "offsets", "topic", "next_offset"),
        *rows(service, "offsets", "topic", "next_offset"),
    ):
        if topic in read:
            read[topic] += offset
    return (
        all(topic_size(stack.kafka, topic) == offset for topic, offset in read.items())
        and not outbox_depth(service)
        and not holder_rows(stack, "outbox", "no")
    )


def forgotten(service: Service, account: str) -> bool:
    """Whether neither the service nor the holder keeps a row of the account, and all messages are read."""
    return (
        not rows(service, "accounts", "account", account=account)
        and (account,) not in holder_rows(service.stack, "accounts", "account")
        and all_read(service)
    )
