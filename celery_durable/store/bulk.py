"""Many new rows in one statement of PostgreSQL, the same for any number of rows and any mix of values.

A column whose values differ is an array, or one JSON document where its values are JSON: psycopg would escape each of
their quotes. A column with one value for all rows is that value: of most columns that is so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection

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
            FROM {_rows(_OPERATION)} ON CONFLICT (id) DO NOTHING RETURNING id
            """
        columns = ", ".join(_PAYLOAD)
        self._payloads = f"INSERT INTO {payloads} ({columns}) SELECT {columns} FROM {_rows(_PAYLOAD)}"

    def operations(self, connection: Connection, rows: Sequence[Mapping[str, Any]]) -> set[str]:
        """Inserts operations, numbered in this order, those excepted whose ID is there. Returns the IDs of the new."""
        return set(connection.exec_driver_sql(self._operations, _columns(_OPERATION, rows)).scalars())

    def payloads(self, connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        """Inserts payloads."""
        connection.exec_driver_sql(self._payloads, _columns(_PAYLOAD, rows))


def _rows(types: Mapping[str, str]) -> str:
    functions = [
        f"json_array_elements(%({name})s::json)" if kind == "json" else f"unnest(%({name})b::{kind}[])"
        for name, kind in types.items()
    ]
    filled = [f"coalesce(one.{name}, %({name}_of_all)s::{kind}) AS {name}" for name, kind in types.items()]
    return f"(SELECT {', '.join(filled)} FROM ROWS FROM ({', '.join(functions)}) AS one({', '.join(types)})) AS new"


def _columns(types: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name, kind in types.items():
        values = [row[name] for row in rows]
        if kind == "json":
            values = [json.dumps(value) for value in values]  # equal values may be other documents: True == 1
        # The IDs say how many rows there are.
        is_one = name != "id" and all(value == values[0] for value in values)
        of_all, values = (values[0], []) if is_one else (None, values)
        columns[name] = f"[{','.join(values)}]" if kind == "json" else values
        columns[f"{name}_of_all"] = of_all
    return columns
