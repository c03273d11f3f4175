"""Marks of ended operations whose end has not been told yet."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from celery_durable.store.migrate import table_names

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Makes the table. What ended before was told, or never will be."""
    prefix, schema = table_names()
    op.create_table(
        f"{prefix}untold",
        sa.Column("operation_id", sa.String(length=255), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False, comment="which of its ends"),
        sa.Column("due_at", sa.BigInteger(), nullable=False, comment="when a dispatcher tells it"),
        sa.Column("tries", sa.Integer(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("operation_id"),
        comment="Ended operations of which the app's own result backend, or an errback, may not know yet",
        schema=schema,
    )
    op.create_index(f"{prefix}untold_due", f"{prefix}untold", ["due_at"], schema=schema)
