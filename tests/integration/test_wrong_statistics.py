"""Statements stay cheap where PostgreSQL's statistics are wrong: a table that is full now was empty when last analyzed.

Tables that fill and empty again are analyzed at any moment. What is planned then is kept for as long as the connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Connection, Table, text

from celery_durable.store import outbox
from celery_durable.store.outbox import Outgoing, Staged
from tests.dispatching import Service

ROWS = 600


@pytest.fixture
def connection(postgresql: Service) -> Iterator[Connection]:
    with postgresql.database.engine.connect() as connection:
        yield connection
        connection.rollback()


def rows_read(connection: Connection, table: Table, statement: Callable[[], object], *, plan: str) -> int:
    """How many rows of the table a statement reads that was planned when statistics said that there is one in all."""
    connection.execute(
        text("UPDATE pg_class SET reltuples = 1, relpages = 200 WHERE oid = CAST(:name AS regclass)"),
        {"name": table.fullname},
    )
    connection.execute(text(f"SET LOCAL plan_cache_mode = {plan}"))
    read = text(
        "SELECT seq_tup_read + coalesce(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables "
        "WHERE relid = CAST(:name AS regclass)"
    )
    before = connection.execute(read, {"name": table.fullname}).scalar_one()
    statement()
    return int(connection.execute(read, {"name": table.fullname}).scalar_one() - before)


plans = pytest.mark.parametrize("plan", ["force_generic_plan", "force_custom_plan"])


def claimed(connection: Connection, table: Table) -> list[Outgoing]:
    """The outbox is full of rows that a relay has claimed."""
    outbox.stage(connection, table, [Staged("accounts", f"k{number}", b"x" * 500, "report") for number in range(ROWS)])
    return outbox.claim(connection, table, limit=ROWS, hold_ms=60_000)


@plans
def test_what_a_relay_has_sent_is_deleted_row_by_row(postgresql: Service, connection: Connection, plan: str) -> None:
    """It took a minute, and passes that replaced reports waited for it: found by a chaos run."""
    table = postgresql.tables.outbox
    sent = claimed(connection, table)
    read = rows_read(connection, table, lambda: outbox.delivered(connection, table, sent), plan=plan)
    assert not outbox.claim(connection, table, limit=1, hold_ms=0)
    assert 0 < read <= 5 * ROWS


@plans
def test_what_a_relay_could_not_send_is_put_off_row_by_row(
    postgresql: Service, connection: Connection, plan: str
) -> None:
    table = postgresql.tables.outbox
    sent = claimed(connection, table)

    def failed() -> None:
        outbox.failed(connection, table, sent, retry_min_ms=10, retry_max_ms=10)

    assert 0 < rows_read(connection, table, failed, plan=plan) <= 5 * ROWS
