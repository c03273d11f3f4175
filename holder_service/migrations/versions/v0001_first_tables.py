"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from celery_durable.store.migrate import table_names

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

COUNTERS = ("version",)


def upgrade() -> None:
    """Makes every table, and the counters at 0."""
    prefix, schema = table_names()
    op.create_table(
        f"{prefix}accounts",
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column(
            "partition", sa.Integer(), nullable=False, comment="where its messages came from last: who runs its timers"
        ),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False, comment="every write is a compare-and-set on it"),
        sa.Column("due_at", sa.BigInteger(), nullable=True, comment="when it needs a timer, without a message"),
        sa.Column("state", sa.Text(), nullable=False, comment="semaphore.AccountState as JSON"),
        sa.PrimaryKeyConstraint("account"),
        comment="What each account's clients reported and were given; idle accounts have no row",
        schema=schema,
    )
    op.create_index(
        f"{prefix}accounts_due",
        f"{prefix}accounts",
        ["partition", "due_at"],
        postgresql_where=sa.text("due_at IS NOT NULL"),
        sqlite_where=sa.text("due_at IS NOT NULL"),
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
        f"{prefix}database",
        sa.Column("only", sa.Integer(), autoincrement=False, nullable=False, comment="1: there is one row"),
        sa.Column(
            "epoch",
            sa.BigInteger(),
            nullable=False,
            comment="the life of this database: its birth, or its last rebuild",
        ),
        sa.Column("born_at", sa.BigInteger(), nullable=False),
        sa.Column("phase", sa.String(length=16), nullable=False, comment="ready, rebuilding, topic_lost"),
        sa.Column("rebuild", sa.Text(), nullable=True, comment="progress of the rebuild, as JSON"),
        sa.Column("revision", sa.BigInteger(), nullable=False, comment="every write is a compare-and-set on it"),
        sa.Column("changed_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("only"),
        comment="Which life of the database this is",
        schema=schema,
    )
    op.create_table(
        f"{prefix}limits",
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("mirror", sa.Text(), nullable=False, comment="permits.messages.LimitMirror as JSON"),
        sa.PrimaryKeyConstraint("account"),
        comment="Commands in force; a row outlives its account's",
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
    counters = sa.table(f"{prefix}counters", sa.column("name"), sa.column("value"), schema=schema)
    op.bulk_insert(counters, [{"name": name, "value": 0} for name in COUNTERS])
