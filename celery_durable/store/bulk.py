"""Many new operations in one statement of PostgreSQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection

from celery_durable.store.arrays import from_rows, parameters
from celery_durable.store.clock import NOW_MS_SQL
from celery_durable.store.prepared import PSYCOPG
from celery_durable.store.schema import Tables

_NOW = NOW_MS_SQL["postgresql"]
_ROW = {
    **dict.fromkeys(("id", "task", "account", "group_", "queue", "state"), "text"),
    **dict.fromkeys(("priority", "retries"), "integer"),
    **dict.fromkeys(
        ("retention_ms", "eta_at", "eta_delay", "expires_at_ms", "expires_delay", "admitted_delay"), "bigint"
    ),
    **dict.fromkeys(("p_id", "p_content_type", "p_content_encoding", "p_digest"), "text"),
    "p_body": "bytea",
    **dict.fromkeys(("p_headers", "p_properties", "p_publish", "p_policy"), "json"),
    **dict.fromkeys(("w_limit", "w_group_limit"), "integer"),
    "w_mutex": "boolean",
}
"""What is written of a new operation; ``p_``: of its payload, ``w_``: of its wake."""


class BulkInsert:
    """The statement for one client's tables."""

    def __init__(self, tables: Tables) -> None:
        names = PSYCOPG.identifier_preparer
        operations, payloads, wakes = (
            names.format_table(table) for table in (tables.operations, tables.payloads, tables.wakes)
        )
        of_payload = [name.removeprefix("p_") for name in _ROW if name.startswith("p_")]
        self._insert = f"""
            WITH new AS MATERIALIZED (SELECT * FROM {from_rows(_ROW)}),
            inserted AS (
                INSERT INTO {operations} (id, task, account, queue, state, priority, retries, retention_ms, "group",
                    due_at, expires_at, admitted_at, enqueued_at)
                SELECT id, task, account, queue, state, priority, retries, retention_ms, group_,
                    coalesce(eta_at, {_NOW} + eta_delay), coalesce(expires_at_ms, {_NOW} + expires_delay),
                    {_NOW} + admitted_delay, {_NOW}
                FROM new ON CONFLICT (id) DO NOTHING RETURNING id
            ),
            payload AS (
                INSERT INTO {payloads} ({", ".join(of_payload)})
                SELECT {", ".join(f"p_{name}" for name in of_payload)} FROM new JOIN inserted USING (id)
            ),
            wake AS (
                INSERT INTO {wakes} (account, "limit", group_limit, mutex)
                SELECT DISTINCT account, w_limit, w_group_limit, w_mutex FROM new JOIN inserted USING (id)
                WHERE account IS NOT NULL
            )
            SELECT id FROM inserted
            """

    def insert(self, connection: Connection, rows: Sequence[Mapping[str, Any]]) -> set[str]:
        """Inserts operations, numbered in this order, their payloads, and one wake for each account and declaration.

        All or none of it, those excepted whose ID is there. Returns the IDs of the new.
        """
        return set(connection.exec_driver_sql(self._insert, parameters(_ROW, rows)).scalars())
