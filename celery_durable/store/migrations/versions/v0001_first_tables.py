"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from celery_durable.store.migrate import table_names

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

COUNTERS = ("report_seq", "command_seq")


def upgrade() -> None:
    """Makes every table, and the counters at 0."""
    prefix, schema = table_names()
    op.create_table(
        f"{prefix}accounts",
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False, comment="permits.queue.AccountState as JSON"),
        sa.Column("blocked", sa.JSON(), nullable=True, comment="why each waiting group waits"),
        sa.Column("due_at", sa.BigInteger(), nullable=True),
        sa.Column("reply", sa.Text(), nullable=True, comment="the newest reply applied, as JSON, for people"),
        sa.PrimaryKeyConstraint("account"),
        comment="What this client was given in each account; idle accounts have no row",
        schema=schema,
    )
    op.create_index(
        f"{prefix}accounts_due",
        f"{prefix}accounts",
        ["due_at"],
        postgresql_where=sa.text("due_at IS NOT NULL"),
        sqlite_where=sa.text("due_at IS NOT NULL"),
        schema=schema,
    )
    op.create_table(
        f"{prefix}attempts",
        sa.Column("no", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("operation_id", sa.String(length=255), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=False, comment="retried, failed, lost"),
        sa.Column("worker", sa.Text(), nullable=True),
        sa.Column("run_token", sa.String(length=64), nullable=True),
        sa.Column("started_at", sa.BigInteger(), nullable=True),
        sa.Column("ended_at", sa.BigInteger(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("no"),
        comment="History: one row for each failed or lost attempt",
        schema=schema,
    )
    op.create_index(f"{prefix}attempts_operation", f"{prefix}attempts", ["operation_id"], schema=schema)
    op.create_table(
        f"{prefix}client",
        sa.Column("client_id", sa.String(length=255), nullable=False),
        sa.Column("incarnation", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("client_id"),
        comment="One row: the service whose database this is, and which database it is",
        schema=schema,
    )
    op.create_table(
        f"{prefix}counters",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
        schema=schema,
    )
    op.create_table(
        f"{prefix}offsets",
        sa.Column("topic", sa.String(length=255), nullable=False),
        sa.Column("partition", sa.Integer(), nullable=False),
        sa.Column(
            "topic_id",
            sa.String(length=64),
            nullable=False,
            comment="Kafka's ID of the topic: another one is a new topic",
        ),
        sa.Column("next_offset", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("topic", "partition"),
        comment="The next offset to read of each partition",
        schema=schema,
    )
    op.create_table(
        f"{prefix}operations",
        sa.Column("order_no", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("generation", sa.Integer(), server_default="1", nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("account", sa.Text(), nullable=True),
        sa.Column("group", sa.Text(), server_default="", nullable=False),
        sa.Column("queue", sa.Text(), nullable=False, comment="Celery queue it is delivered to"),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("priority", sa.Integer(), server_default="0", nullable=False),
        sa.Column(
            "attempt", sa.Integer(), server_default="1", nullable=False, comment="number of the present or next attempt"
        ),
        sa.Column("retries", sa.Integer(), server_default="0", nullable=False, comment="Celery's retries"),
        sa.Column("worker_losses", sa.Integer(), server_default="0", nullable=False),
        sa.Column(
            "sends",
            sa.Integer(),
            server_default="0",
            nullable=False,
            comment="of the present attempt: whoever raises attempt sets 0",
        ),
        sa.Column(
            "due_at", sa.BigInteger(), nullable=True, comment="scheduled, retrying: due; admitted: when to send (again)"
        ),
        sa.Column("expires_at", sa.BigInteger(), nullable=True),
        sa.Column(
            "retention_ms", sa.BigInteger(), nullable=True, comment="kept so long after it ended; null: the setting"
        ),
        sa.Column("run_token", sa.String(length=64), nullable=True),
        sa.Column("worker", sa.Text(), nullable=True),
        sa.Column("alive_until", sa.BigInteger(), nullable=True),
        sa.Column("cancel_requested_at", sa.BigInteger(), nullable=True),
        sa.Column("enqueued_at", sa.BigInteger(), nullable=False),
        sa.Column("admitted_at", sa.BigInteger(), nullable=True),
        sa.Column("started_at", sa.BigInteger(), nullable=True),
        sa.Column("ended_at", sa.BigInteger(), nullable=True),
        sa.Column("result_content_type", sa.String(length=64), nullable=True),
        sa.Column("result_content_encoding", sa.String(length=64), nullable=True),
        sa.Column("result", sa.LargeBinary(), nullable=True, comment="encoded return value, or encoded exception"),
        sa.Column("error", sa.Text(), nullable=True, comment="type and message of the last failure, bounded"),
        sa.Column("traceback", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "state IN ('scheduled', 'queued', 'admitted', 'running', 'retrying', 'succeeded', 'failed', 'cancelled')",
            name=f"{prefix}operations_state",
        ),
        sa.PrimaryKeyConstraint("order_no"),
        sa.UniqueConstraint("id"),
        schema=schema,
    )
    op.create_index(
        f"{prefix}operations_alive",
        f"{prefix}operations",
        ["alive_until"],
        postgresql_where=sa.text("state = 'running'"),
        sqlite_where=sa.text("state = 'running'"),
        schema=schema,
    )
    op.create_index(
        f"{prefix}operations_deliver",
        f"{prefix}operations",
        ["queue", "sends", "due_at"],
        postgresql_where=sa.text("state = 'admitted'"),
        sqlite_where=sa.text("state = 'admitted'"),
        schema=schema,
    )
    op.create_index(
        f"{prefix}operations_due",
        f"{prefix}operations",
        ["due_at"],
        postgresql_where=sa.text("state IN ('scheduled', 'retrying')"),
        sqlite_where=sa.text("state IN ('scheduled', 'retrying')"),
        schema=schema,
    )
    op.create_index(
        f"{prefix}operations_ended",
        f"{prefix}operations",
        ["retention_ms", "ended_at"],
        postgresql_where=sa.text("state IN ('succeeded', 'failed', 'cancelled')"),
        sqlite_where=sa.text("state IN ('succeeded', 'failed', 'cancelled')"),
        schema=schema,
    )
    op.create_index(
        f"{prefix}operations_expires",
        f"{prefix}operations",
        ["expires_at"],
        postgresql_where=sa.text("expires_at IS NOT NULL AND state IN ('scheduled', 'queued', 'admitted', 'retrying')"),
        sqlite_where=sa.text("expires_at IS NOT NULL AND state IN ('scheduled', 'queued', 'admitted', 'retrying')"),
        schema=schema,
    )
    op.create_index(
        f"{prefix}operations_permits",
        f"{prefix}operations",
        ["account", "group"],
        postgresql_where=sa.text("account IS NOT NULL AND state IN ('admitted', 'running', 'retrying')"),
        sqlite_where=sa.text("account IS NOT NULL AND state IN ('admitted', 'running', 'retrying')"),
        schema=schema,
    )
    op.create_index(
        f"{prefix}operations_queued",
        f"{prefix}operations",
        ["account", "group", sa.literal_column("priority DESC"), "order_no"],
        postgresql_where=sa.text("state = 'queued'"),
        sqlite_where=sa.text("state = 'queued'"),
        schema=schema,
    )
    op.create_table(
        f"{prefix}outbox",
        sa.Column("no", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("topic", sa.String(length=255), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("slot", sa.Text(), nullable=True, comment="null: never replaced"),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("headers", sa.JSON(), nullable=True),
        sa.Column(
            "version", sa.BigInteger(), server_default="1", nullable=False, comment="raised when the row is replaced"
        ),
        sa.Column("failures", sa.Integer(), server_default="0", nullable=False),
        sa.Column("due_at", sa.BigInteger(), nullable=False, comment="Unix ms: when to send it (again)"),
        sa.Column("staged_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("no"),
        sa.UniqueConstraint("topic", "key", "slot", name=f"{prefix}outbox_slot"),
        comment="Messages to Kafka, written in the transaction that they report",
        sqlite_autoincrement=True,
        schema=schema,
    )
    op.create_index(f"{prefix}outbox_due", f"{prefix}outbox", ["due_at"], schema=schema)
    op.create_table(
        f"{prefix}payloads",
        sa.Column("id", sa.String(length=255), nullable=False, comment="the operation's"),
        sa.Column("content_type", sa.String(length=64), nullable=False),
        sa.Column("content_encoding", sa.String(length=64), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("headers", sa.JSON(), nullable=False, comment="message headers, as Celery made them"),
        sa.Column(
            "properties", sa.JSON(), nullable=False, comment="message properties: correlation_id, reply_to, priority"
        ),
        sa.Column(
            "publish",
            sa.JSON(),
            nullable=False,
            comment="exchange, routing_key, compression, delivery mode, priority",
        ),
        sa.Column(
            "policy",
            sa.JSON(),
            nullable=False,
            comment="what the task declares: requeue_after_s, max_worker_losses, limit, group_limit, mutex",
        ),
        sa.PrimaryKeyConstraint("id"),
        comment="The wide and constant part of an operation",
        schema=schema,
    )
    op.create_table(
        f"{prefix}wakes",
        sa.Column("no", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("limit", sa.Integer(), nullable=True),
        sa.Column("group_limit", sa.Integer(), nullable=True),
        sa.Column("mutex", sa.Boolean(), nullable=True),
        sa.PrimaryKeyConstraint("no"),
        comment="Insert-only list of accounts that need a pass, with what the enqueued task declares",
        schema=schema,
    )
    op.create_index(f"{prefix}wakes_account", f"{prefix}wakes", ["account"], schema=schema)
    counters = sa.table(f"{prefix}counters", sa.column("name"), sa.column("value"), schema=schema)
    op.bulk_insert(counters, [{"name": name, "value": 0} for name in COUNTERS])
