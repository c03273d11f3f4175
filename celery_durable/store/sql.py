"""Pieces of SQL that statements of both sides share, the same on SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from sqlalchemy import (
    ColumnElement,
    Connection,
    ScalarSelect,
    Table,
    Update,
    any_,
    bindparam,
    literal_column,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite

from celery_durable.store.clock import now_ms

Dialect = Literal["postgresql", "sqlite"]
DIALECTS: tuple[Dialect, ...] = ("postgresql", "sqlite")

T = TypeVar("T")

PARAMETERS_MAX = 5_000
"""Parameters in one statement at most: PostgreSQL refuses more than 65,535, older SQLite more than 32,766."""


def in_states(table: Any, states: Iterable[str]) -> ColumnElement[bool]:
    """``state IN ('…', …)`` with the states written out: a bound value would not match a partial index."""
    values: list[ColumnElement[str]] = [literal_column(f"'{state}'") for state in states]
    column: ColumnElement[str] = table.c.state
    return column == values[0] if len(values) == 1 else column.in_(values)


def among(column: ColumnElement[Any], name: str, dialect: Dialect) -> ColumnElement[bool]:
    """``column`` is in the list of that name. On PostgreSQL an array: ``IN`` would be another statement, to be planned
    anew, for each length."""
    if dialect == "postgresql":
        return column == any_(bindparam(name, type_=postgresql.ARRAY(column.type)))
    return column.in_(bindparam(name, expanding=True))


def database_now() -> ScalarSelect[int]:
    """The database's time as a subquery, computed once a statement: only so does PostgreSQL search an index with it."""
    return select(now_ms()).scalar_subquery()


NOT_WAITING_FOR_DISK = "set_config('synchronous_commit', 'off', true)"
"""Has the transaction's commit not wait for PostgreSQL's disk: for hand-written SQL."""


def not_waiting_for_disk(dialect: Dialect) -> list[ColumnElement[Any]]:
    """To be returned by a statement, so that on PostgreSQL its transaction's commit waits for no disk.

    For what a crash of the server may forget, since all that it does is to spare a message that is sent again. What a
    later transaction commits in the usual way takes it to the disk too.
    """
    return [literal_column(NOT_WAITING_FOR_DISK)] if dialect == "postgresql" else []


def dialect_of(connection: Connection) -> Dialect:
    """The kind of database that the connection leads to."""
    return "postgresql" if connection.dialect.name == "postgresql" else "sqlite"


def is_psycopg(connection: Connection) -> bool:
    """Whether it leads to PostgreSQL by psycopg, and takes arrays: a caller's own session may have another driver."""
    return connection.dialect.driver == "psycopg"


def dialect_insert(dialect: Dialect, table: Table) -> Any:
    """The database's own ``INSERT``, which can have an ``ON CONFLICT``."""
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)


def insert_new(dialect: Dialect, table: Table) -> Any:
    """``INSERT … ON CONFLICT DO NOTHING``."""
    return dialect_insert(dialect, table).on_conflict_do_nothing()


def parts(items: Sequence[T], size: int = PARAMETERS_MAX) -> Iterator[Sequence[T]]:
    """The items, in order, in parts of ``size`` at most: one statement each."""
    return (items[start : start + size] for start in range(0, len(items), size))


def execute_many(connection: Connection, statement: Update, rows: list[Mapping[str, Any]]) -> None:
    """Executes the statement for each of the rows, or not at all."""
    if rows:
        connection.execute(statement, rows)
