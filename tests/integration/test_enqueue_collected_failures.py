"""``using``: calls that wait for their neighbours, when something goes wrong meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from sqlalchemy import Connection, inspect, text
from sqlalchemy.exc import DBAPIError

from celery_durable import EnqueueError, collected, using
from celery_durable.store.operations import NewOperation, Operations, _operation_row
from tests.integration.enqueue_service import Block, Service, fail_after_a_call, service, written


def hide_payloads(shop: Service, connection: Connection) -> None:
    """No operation can be written any more in this transaction, and SQLAlchemy knows nothing of it."""
    connection.connection.cursor().execute(f"ALTER TABLE {shop.tables.payloads.name} RENAME TO away")


@pytest.mark.postgresql
def test_a_statement_that_is_torn(postgresql_server: str) -> None:
    """Nothing is said to a connection that is in the midst of one, as after a time limit's exception."""
    with service(postgresql_server) as shop:
        with shop.runtime.database.engine.connect() as connection:
            with using(connection):
                shop.plain.delay()
                shop.plain.delay()
                connection.connection.driver_connection.pgconn.send_query(b"SELECT 1")  # type: ignore[union-attr]
            assert connection not in collected._of
            connection.invalidate()
        assert shop.count(shop.tables.operations) == 0


def test_a_connection_that_was_closed_or_cut(shop: Service, connection: Connection, block: Block) -> None:
    with block():
        shop.plain.delay()
        connection.invalidate()
    with pytest.raises(EnqueueError, match="invalid transaction"), using(connection):
        shop.plain.delay()
    connection.rollback()
    with block():
        shop.plain.delay()
        connection.close()
        with pytest.raises(EnqueueError, match="This Connection is closed"):
            shop.plain.delay()
    assert shop.count(shop.tables.operations) == 0


def test_missing_tables_are_told_where_the_calls_are_written(
    shop: Service, connection: Connection, block: Block
) -> None:
    """In the words of a call that is written at once."""
    told = []
    for _ in range(2):
        calls = block()
        calls.__enter__()
        hide_payloads(shop, connection)
        if not told:
            with pytest.raises(EnqueueError) as caught:
                shop.plain.apply_async(task_id="mine")
        else:
            shop.plain.delay()
            with pytest.raises(EnqueueError) as caught:
                calls.__exit__(None, None, None)
            assert connection not in collected._of
        told.append(str(caught.value))
        connection.rollback()
    at_once, at_the_end = told
    assert at_the_end == at_once
    assert "using(Connection on " in at_once
    assert "are missing or not up to date" in at_once
    assert shop.count(shop.tables.operations) == 0


def test_the_callers_own_exception_is_never_replaced(shop: Service, connection: Connection, block: Block) -> None:
    with pytest.raises(KeyError):
        fail_after_a_call(shop, block, lambda: hide_payloads(shop, connection))
    # What could not be written goes with its transaction: no COMMIT without it.
    if shop.runtime.database.dialect == "sqlite":
        with pytest.raises(EnqueueError, match="are missing"):
            connection.commit()
    connection.rollback()
    assert shop.count(shop.tables.operations) == 0


def test_a_commit_that_cannot_write_them_commits_nothing(shop: Service, connection: Connection, block: Block) -> None:
    with block():
        shop.plain.delay()
        hide_payloads(shop, connection)
        with pytest.raises(EnqueueError, match="are missing"):
            connection.commit()
        connection.rollback()
        connection.execute(text("SELECT 1"))
        connection.commit()
    assert shop.count(shop.tables.operations) == 0


def test_a_statement_that_cannot_write_them_fails_and_they_are_not_lost(
    shop: Service, connection: Connection, block: Block
) -> None:
    if shop.runtime.database.dialect == "postgresql":
        pytest.skip("there the transaction has failed")
    name = shop.tables.operations.name
    with block():
        shop.plain.delay()
        raw = connection.connection.cursor()
        raw.execute(f"ALTER TABLE {name} RENAME TO away")
        with pytest.raises(EnqueueError, match="are missing"):
            connection.execute(text("SELECT 1"))
        raw.execute(f"ALTER TABLE away RENAME TO {name}")
        connection.execute(text("SELECT 1"))
        connection.commit()
    assert shop.count(shop.tables.operations) == 2


def test_a_failed_transaction(shop: Service, connection: Connection, block: Block) -> None:
    """A call in it is refused at once; what was collected before goes with it, without a word over the caller's."""
    if shop.runtime.database.dialect == "sqlite":
        pytest.skip("there a statement fails alone")
    with pytest.raises(DBAPIError, match="no_such_table"):
        fail_after_a_call(shop, block, lambda: connection.execute(text("SELECT * FROM no_such_table")))
    connection.rollback()
    with block():
        shop.plain.delay()
        with pytest.raises(Exception, match="no_such_table"):
            connection.connection.cursor().execute("SELECT * FROM no_such_table")
        with pytest.raises(DBAPIError, match="current transaction is aborted"):
            shop.plain.delay()
    connection.rollback()
    assert shop.count(shop.tables.operations) == 0


def test_a_nested_transaction_that_is_over(shop: Service, connection: Connection, block: Block) -> None:
    with block():
        savepoint = connection.begin_nested()
        connection.exec_driver_sql("ROLLBACK TO SAVEPOINT sa_savepoint_1")
        connection.exec_driver_sql("RELEASE SAVEPOINT sa_savepoint_1")
        with pytest.raises(DBAPIError):
            savepoint.commit()
        with pytest.raises((DBAPIError, EnqueueError)):
            shop.plain.delay()


@pytest.mark.parametrize(
    "options",
    [{"queue": "a\0b"}, {"headers": {"n": float("nan")}}, {"account": "a\0"}, {"colour": 1}, {"priority": 2**40}],
)
def test_what_is_wrong_with_a_call_is_told_by_the_call(
    options: dict[str, Any], shop: Service, connection: Connection, block: Block
) -> None:
    with block():
        shop.plain.delay()
        with pytest.raises(EnqueueError):
            shop.plain.apply_async((1,), **options)
        with pytest.raises(EnqueueError):
            shop.plain.delay(object())
        shop.plain.delay()
    assert written(shop, connection) == 3


def test_calls_that_were_torn_while_they_were_written_are_written_whole(
    shop: Service, connection: Connection, block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time limit's exception comes between two statements: the next try must not take its own rows for others'."""

    def torn(*arguments: Any) -> None:
        monkeypatch.undo()
        if shop.runtime.database.dialect == "postgresql":
            insert(*arguments)
        else:
            first_statement(*arguments)
        raise SoftTimeLimitExceeded

    def first_statement(self: Operations, connection: Connection, batch: list[NewOperation]) -> None:
        connection.execute(self._insert_returning, [_operation_row(new) for new in batch])

    insert = Operations._insert_new
    with block():
        shop.charge.delay("acme")
        shop.charge.delay("zeta")
        monkeypatch.setattr(Operations, "_insert_new", torn)
        with pytest.raises(SoftTimeLimitExceeded):
            connection.execute(text("SELECT 1"))
    connection.commit()
    assert (shop.count(shop.tables.operations), shop.count(shop.tables.payloads)) == (3, 3)
    assert {row.account for row in shop.rows(shop.tables.wakes)} == {"tenant:acme", "tenant:zeta"}


def test_calls_that_a_release_cannot_write_go_with_their_savepoint(
    shop: Service, connection: Connection, block: Block
) -> None:
    """The caller sees the savepoint fail, and goes on with what was before it."""
    name = shop.tables.payloads.name

    def in_a_savepoint() -> None:
        with connection.begin_nested():
            connection.execute(shop.tables.wakes.insert().values(account="in the savepoint"))
            shop.plain.delay("third")
            shop.plain.delay("fourth")
            hide_payloads(shop, connection)

    with block():
        shop.plain.delay("second")
        with pytest.raises(EnqueueError, match="are missing"):
            in_a_savepoint()
        connection.execute(shop.tables.wakes.insert().values(account="after it"))
        shop.plain.delay("fifth")
        assert name in inspect(connection).get_table_names()
        connection.commit()
    assert shop.count(shop.tables.operations) == 3
    assert [row.account for row in shop.rows(shop.tables.wakes)] == ["after it"]


def test_a_commit_of_what_the_server_rolls_back_is_told(shop: Service, connection: Connection, block: Block) -> None:
    """A statement failed, and its error was passed over: PostgreSQL answers COMMIT with ROLLBACK, psycopg is silent."""
    if shop.runtime.database.dialect == "sqlite":
        pytest.skip("there a statement fails alone")
    with block():
        shop.plain.delay()
        with pytest.raises(Exception, match="no_such_table"):
            connection.connection.cursor().execute("SELECT * FROM no_such_table")
        with pytest.raises(EnqueueError, match="1 calls of this transaction cannot be written"):
            connection.commit()
        connection.rollback()
    assert shop.count(shop.tables.operations) == 0


def test_delays_count_from_the_call(shop: Service, connection: Connection, block: Block) -> None:
    """So a call with a countdown does not wait, and what was collected before it goes first."""
    with block():
        shop.plain.delay("second")
        shop.plain.apply_async(("third",), countdown=60)
        assert written(shop, connection) == 3
        shop.plain.apply_async(("fourth",), expires=60)
        assert written(shop, connection) == 4
        connection.commit()
    assert [row.state for row in shop.rows(shop.tables.operations)] == ["admitted", "admitted", "scheduled", "admitted"]
