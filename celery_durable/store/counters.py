"""Counters of a whole database that never restart: a client's report and command ``seq``, a holder's ``version``."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from sqlalchemy import BigInteger, Column, ColumnElement, Connection, MetaData, String, Table, bindparam, update


def counter_table(metadata: MetaData, prefix: str) -> Table:
    """The table of counters under ``prefix``."""
    return Table(
        f"{prefix}counters",
        metadata,
        Column("name", String(64), primary_key=True),
        Column("value", BigInteger, nullable=False),
    )


def draw(connection: Connection, counters: Table, name: str, count: int = 1) -> range:
    """Draws ``count`` numbers from the counter ``name``, above all drawn before.

    The row stays locked until the transaction ends, so numbers are committed in their order: draw late.
    """
    last = int(connection.execute(_draw(counters), {"counter": name, "count": count}).scalar_one())
    return range(last - count + 1, last + 1)


@lru_cache(maxsize=64)
def _draw(counters: Table) -> Any:
    return (
        update(counters)
        .where(counters.c.name == bindparam("counter"))
        .values(value=counters.c.value + bindparam("count", type_=BigInteger))
        .returning(counters.c.value)
    )


def raise_to(connection: Connection, counters: Table, name: str, value: int | ColumnElement[int]) -> None:
    """Moves the counter up to ``value``, a number or SQL; never down."""
    connection.execute(update(counters).where(counters.c.name == name, counters.c.value < value).values(value=value))
