"""Pieces of SQL that the dispatcher's statements share, the same on SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, ScalarSelect, Table, Update, literal_column, select
from sqlalchemy.dialects import postgresql, sqlite

from celery_durable.store.clock import now_ms
from celery_durable.store.database import Database

Dialect = Literal["postgresql", "sqlite"]


@contextmanager
def held(database: Database) -> Iterator[Connection]:
    """The thread's held connection, for reads in autocommit; dropped after an error, so that the next use connects."""
    try:
        yield database.held()
    except Exception:
        database.drop_held()
        raise


def in_states(table: Any, states: Iterable[str]) -> ColumnElement[bool]:
    """``state IN ('…', …)`` with the states written out: a bound value would not match a partial index."""
    values: list[ColumnElement[str]] = [literal_column(f"'{state}'") for state in states]
    column: ColumnElement[str] = table.c.state
    return column == values[0] if len(values) == 1 else column.in_(values)


def database_now() -> ScalarSelect[int]:
    """The database's time as a subquery, evaluated once a statement: only so can an index be searched with it."""
    return select(now_ms()).scalar_subquery()


def dialect_of(connection: Connection) -> Dialect:
    """The kind of database that the connection leads to."""
    return "postgresql" if connection.dialect.name == "postgresql" else "sqlite"


def insert_new(dialect: Dialect, table: Table) -> Any:
    """``INSERT … ON CONFLICT DO NOTHING``."""
    if dialect == "postgresql":
        return postgresql.insert(table).on_conflict_do_nothing()
    return sqlite.insert(table).on_conflict_do_nothing()


def execute_many(connection: Connection, statement: Update, rows: list[Mapping[str, Any]]) -> None:
    """Executes the statement for each of the rows, or not at all."""
    if rows:
        connection.execute(statement, rows)
