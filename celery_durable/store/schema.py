"""The tables of one service (a client), the same on SQLite and PostgreSQL. Design, sections 6 and 7.

All times are Unix ms of the database's clock (:mod:`celery_durable.store.clock`).
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    text,
)

from celery_durable.store.counters import counter_table
from celery_durable.store.offsets import offsets_table
from celery_durable.store.outbox import outbox_table

ROW_NUMBER = BigInteger().with_variant(Integer, "sqlite")
"""A growing primary key: SQLite numbers rows only in a column declared INTEGER."""

DEFAULT_PREFIX = "durable_"

SCHEDULED, QUEUED, ADMITTED, RUNNING, RETRYING = "scheduled", "queued", "admitted", "running", "retrying"
SUCCEEDED, FAILED, CANCELLED = "succeeded", "failed", "cancelled"
WAITING_STATES = (SCHEDULED, QUEUED)
PERMIT_STATES = (ADMITTED, RUNNING, RETRYING)
"""An operation with an account holds a permit exactly while it is in one of these."""
ENDED_STATES = (SUCCEEDED, FAILED, CANCELLED)
STATES = (*WAITING_STATES, *PERMIT_STATES, *ENDED_STATES)
LOST, RETRIED = "lost", "retried"
"""Outcomes of an attempt after which its operation may run again; the others are ended states."""


@dataclass(frozen=True)
class Tables:
    """The tables of one client, under its prefix and schema."""

    metadata: MetaData
    prefix: str
    client: Table
    operations: Table
    payloads: Table
    attempts: Table
    untold: Table
    wakes: Table
    accounts: Table
    outbox: Table
    offsets: Table
    counters: Table


def _in(states: tuple[str, ...]) -> str:
    return "(" + ", ".join(f"'{state}'" for state in states) + ")"


def build_tables(prefix: str = DEFAULT_PREFIX, schema: str | None = None) -> Tables:
    """The tables under ``prefix`` (and, on PostgreSQL, in ``schema``)."""
    metadata = MetaData(schema=schema)

    def index(name: str, *columns: str, where: str | None = None) -> Index:
        condition = None if where is None else text(where)
        return Index(
            f"{prefix}{name}",
            *(text(c) if " " in c else c for c in columns),
            postgresql_where=condition,
            sqlite_where=condition,
        )

    client = Table(
        f"{prefix}client",
        metadata,
        Column("client_id", String(255), primary_key=True),
        Column("incarnation", String(64), nullable=False),
        Column("created_at", BigInteger, nullable=False),
        comment="One row: the service whose database this is, and which database it is",
    )
    operations = Table(
        f"{prefix}operations",
        metadata,
        Column("order_no", ROW_NUMBER, primary_key=True, autoincrement=True),
        Column("id", String(255), nullable=False, unique=True),
        Column("generation", Integer, nullable=False, server_default="1"),
        Column("task", Text, nullable=False),
        Column("account", Text),
        Column("group", Text, nullable=False, server_default=""),
        Column("queue", Text, nullable=False, comment="Celery queue it is delivered to"),
        Column("state", String(16), nullable=False),
        Column("priority", Integer, nullable=False, server_default="0"),
        Column(
            "attempt",
            Integer,
            nullable=False,
            server_default="1",
            comment="number of the present or next attempt",
        ),
        Column("retries", Integer, nullable=False, server_default="0", comment="Celery's retries"),
        Column("worker_losses", Integer, nullable=False, server_default="0"),
        Column(
            "sends",
            Integer,
            nullable=False,
            server_default="0",
            comment="of the present attempt: whoever raises attempt sets 0",
        ),
        Column("due_at", BigInteger, comment="scheduled, retrying: due; admitted: when to send (again)"),
        Column("expires_at", BigInteger),
        Column("retention_ms", BigInteger, comment="kept so long after it ended; null: the setting"),
        Column("run_token", String(64)),
        Column("worker", Text),
        Column("alive_until", BigInteger),
        Column("cancel_requested_at", BigInteger),
        Column("enqueued_at", BigInteger, nullable=False),
        Column("admitted_at", BigInteger),
        Column("started_at", BigInteger),
        Column("ended_at", BigInteger),
        Column("result_content_type", String(64)),
        Column("result_content_encoding", String(64)),
        Column("result", LargeBinary, comment="encoded return value, or encoded exception"),
        Column("error", Text, comment="type and message of the last failure, bounded"),
        Column("traceback", Text),
        CheckConstraint(f"state IN {_in(STATES)}", name=f"{prefix}operations_state"),
        index("operations_queued", "account", "group", "priority DESC", "order_no", where=f"state = '{QUEUED}'"),
        index(
            "operations_permits",
            "account",
            "group",
            where=f"account IS NOT NULL AND state IN {_in(PERMIT_STATES)}",
        ),
        index("operations_due", "due_at", where=f"state IN {_in((SCHEDULED, RETRYING))}"),
        index("operations_unsent", "queue", "due_at", where=f"state = '{ADMITTED}' AND sends = 0"),
        index("operations_sent", "queue", "due_at", where=f"state = '{ADMITTED}' AND sends > 0"),
        index("operations_alive", "alive_until", where=f"state = '{RUNNING}'"),
        index(
            "operations_expires",
            "expires_at",
            where=f"expires_at IS NOT NULL AND state IN {_in((*WAITING_STATES, ADMITTED, RETRYING))}",
        ),
        index("operations_ended", "retention_ms", "ended_at", where=f"state IN {_in(ENDED_STATES)}"),
    )
    payloads = Table(
        f"{prefix}payloads",
        metadata,
        Column("id", String(255), primary_key=True, comment="the operation's"),
        Column("content_type", String(64), nullable=False),
        Column("content_encoding", String(64), nullable=False),
        Column("body", LargeBinary, nullable=False),
        Column("digest", String(64), nullable=False),
        Column("headers", JSON, nullable=False, comment="message headers, as Celery made them"),
        Column(
            "properties",
            JSON,
            nullable=False,
            comment="message properties: correlation_id, reply_to, priority",
        ),
        Column(
            "publish",
            JSON,
            nullable=False,
            comment="exchange, routing_key, compression, delivery mode, priority",
        ),
        Column(
            "policy",
            JSON,
            nullable=False,
            comment="what the task declares: requeue_after_s, max_worker_losses, limit, group_limit, mutex",
        ),
        comment="The wide and constant part of an operation",
    )
    attempts = Table(
        f"{prefix}attempts",
        metadata,
        Column("no", ROW_NUMBER, primary_key=True, autoincrement=True),
        Column("operation_id", String(255), nullable=False),
        Column("generation", Integer, nullable=False),
        Column("attempt", Integer, nullable=False),
        Column("outcome", String(16), nullable=False, comment="retried, failed, lost"),
        Column("worker", Text),
        Column("run_token", String(64)),
        Column("started_at", BigInteger),
        Column("ended_at", BigInteger, nullable=False),
        Column("error", Text),
        Index(f"{prefix}attempts_operation", "operation_id"),
        comment="History: one row for each failed or lost attempt",
    )
    untold = Table(
        f"{prefix}untold",
        metadata,
        Column("operation_id", String(255), primary_key=True),
        Column("generation", Integer, nullable=False, comment="which of its ends"),
        Column("due_at", BigInteger, nullable=False, comment="when a dispatcher tells it"),
        Column("tries", Integer, nullable=False, server_default="0"),
        Index(f"{prefix}untold_due", "due_at"),
        comment="Ended operations of which the app's own result backend, or an errback, may not know yet",
    )
    wakes = Table(
        f"{prefix}wakes",
        metadata,
        Column("no", ROW_NUMBER, primary_key=True, autoincrement=True),
        Column("account", Text, nullable=False),
        Column("limit", Integer),
        Column("group_limit", Integer),
        Column("mutex", Boolean),
        Index(f"{prefix}wakes_account", "account"),
        comment="Insert-only list of accounts that need a pass, with what the enqueued task declares",
    )
    accounts = Table(
        f"{prefix}accounts",
        metadata,
        Column("account", Text, primary_key=True),
        Column("state", Text, nullable=False, comment="permits.queue.AccountState as JSON"),
        Column("blocked", JSON, comment="why each waiting group waits"),
        Column("due_at", BigInteger),
        Column("reply", Text, comment="the newest reply applied, as JSON, for people"),
        index("accounts_due", "due_at", where="due_at IS NOT NULL"),
        comment="What this client was given in each account; idle accounts have no row",
    )
    return Tables(
        metadata=metadata,
        prefix=prefix,
        client=client,
        operations=operations,
        payloads=payloads,
        attempts=attempts,
        untold=untold,
        wakes=wakes,
        accounts=accounts,
        outbox=outbox_table(metadata, prefix),
        offsets=offsets_table(metadata, prefix),
        counters=counter_table(metadata, prefix),
    )
