"""Statements of the hot path, compiled once: SQLAlchemy's way from construct to cursor takes longer than most do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import JSON, Connection, CursorResult, Executable
from sqlalchemy.dialects.postgresql.psycopg import dialect as psycopg_dialect

PSYCOPG: Any = psycopg_dialect()  # type: ignore[no-untyped-call]


class Prepared:
    """A statement for PostgreSQL whose parameters are named, none of them a list."""

    def __init__(self, statement: Executable) -> None:
        compiled: Any = statement.compile(dialect=PSYCOPG)  # type: ignore[attr-defined]
        self._sql: str = compiled.string
        self._json = [name for name, bind in compiled.binds.items() if isinstance(bind.type, JSON)]

    def execute(self, connection: Connection, parameters: Mapping[str, Any]) -> CursorResult[Any]:
        """Executes it. The parameters hold every name; those that are JSON are written as such here."""
        return connection.exec_driver_sql(self._sql, self._values(parameters))

    def first(self, driver_connection: Any, parameters: Mapping[str, Any]) -> Any:
        """Executes it by psycopg alone, which raises its own errors. Returns the first row, None if there is none."""
        return driver_connection.execute(self._sql, self._values(parameters), prepare=True).fetchone()

    def _values(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        values = dict(parameters)
        for name in self._json:
            values[name] = json.dumps(values[name])
        return values
