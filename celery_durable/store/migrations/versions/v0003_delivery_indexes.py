"""Two indexes of admitted operations in place of one: what was never sent, and what was sent and has not started.

The first entry of each then says when the next one of its kind is due.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from celery_durable.store.migrate import table_names

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Makes the two, and drops the one."""
    prefix, schema = table_names()
    table = f"{prefix}operations"
    for name, sends in (("unsent", "sends = 0"), ("sent", "sends > 0")):
        where = sa.text(f"state = 'admitted' AND {sends}")
        op.create_index(
            f"{table}_{name}", table, ["queue", "due_at"], postgresql_where=where, sqlite_where=where, schema=schema
        )
    op.drop_index(f"{table}_deliver", table_name=table, schema=schema)
