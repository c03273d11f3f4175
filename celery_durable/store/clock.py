"""The database's clock, in Unix ms: every due time follows it, so a host's wrong clock shifts nothing (case C17)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import BigInteger
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement


class now_ms(FunctionElement[int]):  # noqa: N801 - reads as the SQL function it is
    """SQL expression: the database's time now, in Unix ms (not the transaction's start)."""

    type = BigInteger()
    inherit_cache = True
    name = "now_ms"


NOW_MS_SQL = {
    "postgresql": "(extract(epoch from clock_timestamp()) * 1000)::bigint",
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
}
"""The same expression for hand-written statements, by dialect name."""


@compiles(now_ms, "postgresql")
def _postgresql(_element: now_ms, _compiler: Any, **_kw: Any) -> str:
    return NOW_MS_SQL["postgresql"]


@compiles(now_ms, "sqlite")
def _sqlite(_element: now_ms, _compiler: Any, **_kw: Any) -> str:
    return NOW_MS_SQL["sqlite"]


def aware(at_ms: int | None) -> datetime | None:
    """A time of the database's, in UTC; None stays None."""
    return None if at_ms is None else datetime.fromtimestamp(at_ms / 1000, UTC)
