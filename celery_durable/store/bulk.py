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
_OPERATION = {
    **dict.fromkeys(("id", "task", "account", "group_", "queue", "state"), "text"),
    **dict.fromkeys(("priority", "retries"), "integer"),
    **dict.fromkeys(
        ("retention_ms", "eta_at", "eta_delay", "expires_at_ms", "expires_delay", "admitted_delay"), "bigint"
    ),
}
_PAYLOAD = {
    **dict.fromkeys(("id", "content_type", "content_encoding", "digest"), "text"),
    "body": "bytea",
    **dict.fromkeys(("headers", "properties", "publish", "policy"), "json"),
}


class BulkInsert:
    """The statements for one client's tables."""

    def __init__(self, tables: Tables) -> None:
        names = PSYCOPG.identifier_preparer
        operations, payloads = names.format_table(tables.operations), names.format_table(tables.payloads)
        self._operations = f"""
            INSERT INTO {operations} (id, task, account, queue, state, priority, retries, retention_ms, "group", due_at,
                expires_at, admitted_at, enqueued_at)
            SELECT id, task, account, queue, state, priority, retries, retention_ms, group_,
                coalesce(eta_at, {_NOW} + eta_delay), coalesce(expires_at_ms, {_NOW} + expires_delay),
                {_NOW} + admitted_delay, {_NOW}
            FROM {from_rows(_OPERATION)} ON CONFLICT (id) DO NOTHING RETURNING id
            """
        columns = ", ".join(_PAYLOAD)
        self._payloads = f"INSERT INTO {payloads} ({columns}) SELECT {columns} FROM {from_rows(_PAYLOAD)}"

    def operations(self, connection: Connection, rows: Sequence[Mapping[str, Any]]) -> set[str]:
        """Inserts operations, numbered in this order, those excepted whose ID is there. Returns the IDs of the new."""
        return set(connection.exec_driver_sql(self._operations, parameters(_OPERATION, rows)).scalars())

    def payloads(self, connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        """Inserts payloads."""
        connection.exec_driver_sql(self._payloads, parameters(_PAYLOAD, rows))
