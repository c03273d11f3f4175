"""One service's database and the parts of its dispatcher, for tests that call them step by step, without processes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from celery import Celery
from kombu import Queue
from sqlalchemy import Connection, Row, event, func, insert, select, text, update

from celery_durable.dispatcher.delivery import BREATH_S, Delivery
from celery_durable.dispatcher.failures import together_or_one_by_one
from celery_durable.dispatcher.passes import AfterCommit, Passes
from celery_durable.dispatcher.recovery import Recovery
from celery_durable.dispatcher.retention import Retention
from celery_durable.permits.messages import AccountReply, AccountReport, ReplyGroup
from celery_durable.permits.state import AccountState
from celery_durable.runtime import Runtime
from celery_durable.settings import Settings
from celery_durable.store.accounts import client_identity, wake
from celery_durable.store.admission import Admitted
from celery_durable.store.clock import now_ms
from celery_durable.store.database import Database
from celery_durable.store.migrate import migrate
from celery_durable.store.schema import PERMIT_STATES, QUEUED, build_tables
from tests.invariants import Invariants

CLIENT_ID = "billing"
EPOCH = 1_700_000_000_000


class Service:
    """A service's database, migrated."""

    def __init__(self, url: str, **settings: Any) -> None:
        configured = Settings(
            client_id=CLIENT_ID, database_url=url, kafka_bootstrap_servers="127.0.0.1:1", _env_file=None, **settings
        )
        self.runtime = Runtime(configured, Database(url), build_tables())
        self.database, self.tables = self.runtime.database, self.runtime.tables
        migrate(self.database, self.tables)
        with self.database.transaction() as connection:
            self.incarnation = client_identity(connection, self.tables, CLIENT_ID)[1]
        self.handed: list[Admitted] = []
        self.invariants = Invariants()
        self._version = 0
        self._others: list[Service] = []

    def close(self) -> None:
        """Closes its connections, and those of :meth:`again`."""
        for other in self._others:
            other.close()
        self.database.dispose()

    def again(self, **settings: Any) -> Service:
        """The same database as another process sees it, with these settings."""
        other = object.__new__(Service)
        other.__dict__.update(self.__dict__)
        url = self.runtime.settings.database_url.get_secret_value()
        changed = self.runtime.settings.model_copy(update=settings)
        other.runtime = Runtime(changed, Database(url), self.tables)
        other.database, other.handed, other._others = other.runtime.database, [], []
        self._others.append(other)
        return other

    def add(self, *ids: str, wakes: bool = True, **columns: Any) -> None:
        """Operations as an enqueue inserts them: by default queued in account ``acme``."""
        with self.database.transaction() as connection:
            self.insert(connection, ids, wakes=wakes, **columns)

    def insert(self, connection: Any, ids: Sequence[str], *, wakes: bool = True, **columns: Any) -> None:
        """As :meth:`add`, in the caller's transaction. Column ``policy``, ``publish`` … are the payload's."""
        values: dict[str, Any] = {"account": "acme", "group": "", "queue": "celery", "state": QUEUED, "task": "t"}
        payload: dict[str, Any] = {
            "content_type": "application/json",
            "content_encoding": "utf-8",
            "body": b"[[], {}, {}]",
            "digest": "d",
            "headers": {"task": "t"},
            "properties": {"correlation_id": "c"},
            "publish": None,
            "policy": {},
        }
        for name, value in columns.items():
            (payload if name in payload else values)[name] = value
        if payload["publish"] is None:
            payload["publish"] = {"exchange": "", "routing_key": values["queue"]}
        for start in range(0, len(ids), 1_000):
            part = ids[start : start + 1_000]
            connection.execute(
                insert(self.tables.operations).values(enqueued_at=now_ms()), [{**values, "id": one} for one in part]
            )
            connection.execute(insert(self.tables.payloads), [{**payload, "id": one} for one in part])
        if wakes:
            wake(connection, self.tables, [values["account"]])

    def change(self, *ids: str, **columns: Any) -> None:
        """Writes columns of operations; ``due_at="now"`` and the like mean the database's time."""
        values = {name: now_ms() if value == "now" else value for name, value in columns.items()}
        with self.database.transaction() as connection:
            connection.execute(
                update(self.tables.operations).where(self.tables.operations.c.id.in_(ids)).values(values)
            )

    def end(self, *ids: str) -> None:
        """Operations succeed, as a worker settles them: their rows, and a wake."""
        self.change(*ids, state="succeeded", ended_at="now", run_token=None, alive_until=None)
        with self.database.transaction() as connection:
            wake(connection, self.tables, [self.row(one).account for one in ids])

    def row(self, operation_id: str) -> Row[Any]:
        """An operation's row."""
        with self.database.reading() as connection:
            operations = self.tables.operations
            return connection.execute(select(operations).where(operations.c.id == operation_id)).one()

    def ids(self, *states: str, account: str | None = None, group: str | None = None) -> list[str]:
        """The operations in these states, in order."""
        operations = self.tables.operations
        statement = select(operations.c.id).where(operations.c.state.in_(states)).order_by(operations.c.order_no)
        if account is not None:
            statement = statement.where(operations.c.account == account)
        if group is not None:
            statement = statement.where(operations.c.group == group)
        with self.database.reading() as connection:
            return list(connection.scalars(statement))

    def in_use(self, account: str = "acme", group: str | None = None) -> int:
        """How many operations hold a permit."""
        return len(self.ids(*PERMIT_STATES, account=account, group=group))

    def look(self, account: str, limit: int, group_limits: Mapping[str, int]) -> None:
        """What must hold of the account now: the bound, and that what it acknowledges and reports only grows.

        From one thread at a time.
        """
        operations, accounts = self.tables.operations, self.tables.accounts
        used = (
            select(operations.c.group, func.count())
            .where(operations.c.state.in_(PERMIT_STATES), operations.c.account == account)
            .group_by(operations.c.group)
        )
        with self.database.reading() as connection:
            in_use = {(CLIENT_ID, str(group)): int(count) for group, count in connection.execute(used)}
            known = connection.scalar(select(accounts.c.state).where(accounts.c.account == account))
        self.invariants.bound(in_use, limit, group_limits)
        ack = None if known is None else AccountState.from_json(known).ack
        if ack is not None:
            self.invariants.grows("ack", account, ack)
        self.invariants.grows("seq", CLIENT_ID, (self.newest_seq(),))

    def count(self, table: str) -> int:
        """Rows of a table."""
        with self.database.reading() as connection:
            return int(connection.execute(select(func.count()).select_from(getattr(self.tables, table))).scalar_one())

    def account(self, account: str = "acme") -> Row[Any] | None:
        """An account's row."""
        accounts = self.tables.accounts
        with self.database.reading() as connection:
            return connection.execute(select(accounts).where(accounts.c.account == account)).one_or_none()

    def report(self, account: str = "acme") -> AccountReport | None:
        """The report that is staged for an account."""
        outbox = self.tables.outbox
        with self.database.reading() as connection:
            body = connection.execute(select(outbox.c.body).where(outbox.c.key == account)).scalar_one_or_none()
        return None if body is None else AccountReport.model_validate(json.loads(body))

    def sent(self, account: str = "acme") -> AccountReport | None:
        """Takes the staged report out of the outbox, as the relay does once Kafka has it."""
        found = self.report(account)
        with self.database.transaction() as connection:
            connection.execute(self.tables.outbox.delete().where(self.tables.outbox.c.key == account))
        return found

    def waiting_for_locks(self) -> int:
        """How many sessions of the database wait for a lock now (PostgreSQL)."""
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        with self.database.reading() as connection:
            return int(connection.execute(text(waiting)).scalar_one())

    def passes(self) -> Passes:
        """Its passes; what they admit is in ``handed``."""
        return Passes(self.runtime, hand_over=self.handed.extend)

    def run_passes(self, passes: Passes | None = None) -> None:
        """Steps until nothing is to be done at once."""
        passes = passes or self.passes()
        for _ in range(200):
            if passes.step() is not None:
                return
        raise AssertionError("the passes do not come to rest")

    def reply(
        self, *groups: ReplyGroup, account: str = "acme", answers: int | None = None, **fields: Any
    ) -> AccountReply:
        """A reply in a new version, which answers the newest report unless told otherwise."""
        if "version" not in fields:
            self._version += 1
        values = {
            "epoch": EPOCH,
            "version": self._version,
            "answers": self.newest_seq() if answers is None else answers,
        }
        return AccountReply(
            client_id=CLIENT_ID, incarnation=self.incarnation, account=account, groups=groups, **{**values, **fields}
        )

    def newest_seq(self) -> int:
        """The highest ``seq`` of a report that was drawn."""
        counters = self.tables.counters
        with self.database.reading() as connection:
            statement = select(counters.c.value).where(counters.c.name == "report_seq")
            return int(connection.execute(statement).scalar_one())

    def apply(self, *replies: AccountReply, passes: Passes | None = None) -> None:
        """Applies replies as the reply reader does."""
        sink = passes or self.passes()

        def in_one_transaction(one_by_one: bool) -> AfterCommit:
            with self.database.transaction() as connection:
                return sink.apply_replies(connection, replies, one_by_one=one_by_one)

        together_or_one_by_one(in_one_transaction)()

    def lease(self, permits: int, *, account: str = "acme", group: str = "", **fields: Any) -> None:
        """The account's newest report went out, and the holder answered it with a lease."""
        self.sent(account)
        self.apply(self.reply(ReplyGroup(group=group, permits=permits, **fields), account=account))

    def delivery(self, app: Celery, **hints: Any) -> Delivery:
        """Its delivery to the app's broker."""
        return Delivery(app, self.runtime, **hints)

    def recovery(self, **hints: Any) -> Recovery:
        """Its recovery."""
        return Recovery(Celery(set_as_current=False), self.runtime, **hints)

    def retention(self) -> Retention:
        """Its retention."""
        return Retention(self.runtime)


def steps(step: Any) -> None:
    """Calls a step until nothing is to be done at once, or after the pause of one that found little."""
    for _ in range(200):
        due_s = step()
        if due_s is not None and due_s > BREATH_S:
            return
        time.sleep(due_s or 0.0)
    raise AssertionError("the step does not come to rest")


def received(app: Celery, queue: str) -> list[Any]:
    """Takes every message out of a queue of the app's broker."""
    with app.connection_for_read() as connection:
        bound = Queue(queue)(connection.default_channel)
        messages = []
        while (message := bound.get(no_ack=True)) is not None:
            messages.append(message)
        return messages


@contextmanager
def counted_statements(database: Database) -> Iterator[list[str]]:
    """The SQL statements that the database's connections execute meanwhile."""
    statements: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        statements.append(statement)

    with noted_statements(database, note):
        yield statements


@contextmanager
def noted_statements(database: Database, note: Callable[..., None]) -> Iterator[None]:
    """``note`` is called before each statement that SQLAlchemy executes, as its ``before_cursor_execute`` is."""
    engines = [database.engine]
    if database.dialect == "postgresql":  # on SQLite the one is a view of the other, and has its events
        engines.append(database.autocommit_engine)
    for engine in engines:
        event.listen(engine, "before_cursor_execute", note)
    try:
        yield
    finally:
        for engine in engines:
            event.remove(engine, "before_cursor_execute", note)


def noted_commits(database: Database) -> list[str]:
    """What ``synchronous_commit`` is as each of its transactions commits, from now on."""
    said: list[str] = []

    def note(connection: Connection) -> None:
        said.append(connection.exec_driver_sql("SHOW synchronous_commit").scalar_one())

    event.listen(database.engine, "commit", note)
    return said
