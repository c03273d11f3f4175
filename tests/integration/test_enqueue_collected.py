"""``using``: calls that are written together, and nobody can tell but by the number of statements."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.orm import Session

import celery_durable
from celery_durable import collected, using
from tests.dispatching import counted_statements
from tests.integration.enqueue_service import Block, Service, fail_after_a_call, service, written


def test_a_hundred_calls_cost_few_statements(shop: Service, connection: Connection) -> None:
    with counted_statements(shop.runtime.database) as counted, connection.begin(), using(connection):
        results = [shop.charge.delay(f"tenant-{number % 3}") for number in range(100)]
    insertions = [statement for statement in counted if "INSERT" in statement]
    # By psycopg one for the first and one for the others; else operations, payloads and wakes, twice.
    assert len(insertions) == (2 if shop.runtime.database.dialect == "postgresql" else 6)
    assert [row.id for row in shop.rows(shop.tables.operations)] == [result.id for result in results]
    assert shop.count(shop.tables.payloads) == 100
    assert {row.account for row in shop.rows(shop.tables.wakes)} == {f"tenant:tenant-{number}" for number in range(3)}


def test_one_call_costs_what_it_costs_alone(shop: Service, connection: Connection) -> None:
    with using(connection), counted_statements(shop.runtime.database) as counted:
        shop.plain.delay()
        assert written(shop, connection) == 1
        first = len([statement for statement in counted if "INSERT" in statement])
        connection.execute(text("SELECT 1"))
        shop.plain.delay()
        connection.execute(text("SELECT 1"))
        assert len([statement for statement in counted if "INSERT" in statement]) == 2 * first
    connection.rollback()


def test_a_statement_of_the_callers_finds_the_calls_before_it(
    shop: Service, connection: Connection, block: Block
) -> None:
    with block():
        shop.plain.delay()
        assert written(shop, connection) == 1
        assert shop.count(shop.tables.operations, connection) == 2
        shop.plain.delay()
        connection.exec_driver_sql("SELECT 1")
        assert written(shop, connection) == 3


def test_savepoints_keep_what_came_before_them(shop: Service, connection: Connection, block: Block) -> None:
    with block():
        shop.plain.delay("kept")
        savepoint = connection.begin_nested()
        assert written(shop, connection) == 2
        shop.plain.delay("dropped")
        with counted_statements(shop.runtime.database) as counted:
            savepoint.rollback()
        assert not [statement for statement in counted if "INSERT" in statement]
        inner = connection.begin_nested()
        shop.plain.delay("kept")
        assert written(shop, connection) == 2
        inner.commit()
        assert written(shop, connection) == 3
        outer, inner = connection.begin_nested(), connection.begin_nested()
        shop.plain.delay("dropped")
        inner.commit()
        shop.plain.delay("dropped")
        outer.rollback()
        connection.commit()
    assert shop.count(shop.tables.operations) == 3


def test_savepoints_of_a_session(shop: Service) -> None:
    with Session(shop.runtime.database.engine) as session, using(session):
        for _ in range(2):
            shop.plain.delay()
            savepoint = session.begin_nested()
            shop.plain.delay()
            savepoint.rollback()
        with session.begin_nested():
            shop.plain.delay()
        session.commit()
    assert shop.count(shop.tables.operations) == 3


def test_a_commit_inside_the_block_takes_everything_along(shop: Service, connection: Connection, block: Block) -> None:
    with block():
        shop.plain.delay()
        connection.commit()
        assert shop.count(shop.tables.operations) == 2
        assert not connection.in_transaction()
        shop.plain.delay()
        shop.plain.delay()
        connection.rollback()
        shop.plain.delay()
        shop.plain.delay()
    connection.commit()
    assert shop.count(shop.tables.operations) == 4


def test_a_rollback_inside_the_block_drops_what_was_collected(
    shop: Service, connection: Connection, block: Block
) -> None:
    with block():
        shop.plain.delay()
        connection.rollback()
        assert not connection.in_transaction()
    assert not connection.in_transaction()  # the end had nothing to write
    assert shop.count(shop.tables.operations) == 0


def test_a_session_whose_transaction_began_anew(shop: Service) -> None:
    with Session(shop.runtime.database.engine) as session, using(session):
        for turn in range(4):
            shop.plain.delay()
            shop.plain.delay()
            session.rollback() if turn % 2 else session.commit()
        shop.plain.delay()
        shop.plain.delay()
        session.close()
    assert shop.count(shop.tables.operations) == 4


def test_the_end_of_the_block_writes(shop: Service, connection: Connection, block: Block) -> None:
    with block():
        shop.plain.delay()
    assert written(shop, connection) == 2
    with pytest.raises(KeyError):
        fail_after_a_call(shop, block)
    assert written(shop, connection) == 4


def test_what_the_driver_commits_inside_is_without_them(shop: Service, connection: Connection, block: Block) -> None:
    """Nobody can hear that. The block's end writes them, and the caller commits them or not."""
    with block():
        shop.plain.delay()
        connection.connection.commit()
        assert shop.count(shop.tables.operations) == 1
        shop.plain.delay()
    assert written(shop, connection) == 3
    connection.commit()
    assert shop.count(shop.tables.operations) == 3


def test_a_generator_that_is_closed_leaves_them_to_the_transaction(
    shop: Service, connection: Connection, block: Block
) -> None:
    """Garbage is collected in the midst of anything: no statement may come from there."""

    def calls() -> Iterator[None]:
        with block():
            shop.plain.delay()
            yield

    generator = calls()
    next(generator)
    del generator
    gc.collect()
    assert written(shop, connection) == 1
    connection.commit()
    assert shop.count(shop.tables.operations) == 2


def test_nothing_listens_after_the_block(shop: Service, connection: Connection, block: Block) -> None:
    names = ("before_cursor_execute", "commit", "rollback", "rollback_savepoint")

    def listeners() -> list[int]:
        return [len(list(getattr(connection.dispatch, name))) for name in names]  # type: ignore[attr-defined]

    before = listeners()
    with block():
        assert listeners() == before  # one call alone needs none
        shop.plain.delay()
        assert listeners() == [number + 1 for number in before]
        shop.plain.delay()
        connection.commit()
        shop.plain.delay()
        assert listeners() == [number + 1 for number in before]
    assert listeners() == before
    with pytest.raises(KeyError):
        fail_after_a_call(shop, block)
    assert listeners() == before


def test_a_full_batch_is_written(
    shop: Service, connection: Connection, block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collected, "BATCH_ROWS", 3)
    with block():
        for number in range(4):
            assert written(shop, connection) == 1, number
            shop.plain.delay()
        assert written(shop, connection) == 4
    monkeypatch.setattr(collected, "BATCH_BYTES", 1_000)
    connection.rollback()
    with block():
        shop.plain.delay("x" * 1_000)
        assert written(shop, connection) == 1
        shop.plain.delay("x" * 1_000)
        assert written(shop, connection) == 2


@pytest.mark.parametrize(
    "act",
    [
        lambda shop: shop.plain.apply_async(("mine",), task_id="mine"),
        lambda shop: shop.plain.enqueue_many([("many",)]),
        lambda shop: celery_durable.limits.set("acme", 3, app=shop.app),
        lambda shop: celery_durable.pause("acme", app=shop.app),
        lambda shop: shop.plain.AsyncResult("mine").cancel(),
        lambda shop: shop.plain.AsyncResult("mine").forget(),
        lambda shop: shop.plain.AsyncResult("mine").state,
    ],
    ids=["task_id", "enqueue_many", "limit", "pause", "cancel", "forget", "state"],
)
def test_whatever_else_is_ours_comes_after_them(
    act: Callable[[Service], object], shop: Service, connection: Connection, block: Block
) -> None:
    with block():
        waits = shop.plain.delay("waits").id
        assert written(shop, connection) == 1
        act(shop)
        assert written(shop, connection) >= 2
        operations = shop.tables.operations
        rows = connection.execute(operations.select().order_by(operations.c.order_no)).all()
        assert rows[1].id == waits


def test_a_collected_call_can_be_read_and_cancelled(shop: Service, connection: Connection, block: Block) -> None:
    with block():
        result = shop.charge.delay("acme")
        assert result.info["state"] == "queued"
        result = shop.charge.delay("acme")
        assert result.cancel() == "cancelled"


def test_in_autocommit_a_call_is_committed_when_it_returns(shop: Service) -> None:
    engine = shop.runtime.database.engine
    for mine in (
        engine.execution_options(isolation_level="AUTOCOMMIT"),
        create_engine(engine.url, isolation_level="AUTOCOMMIT"),
    ):
        before = shop.count(shop.tables.operations)
        with mine.connect() as connection, using(connection):
            for number in range(3):
                shop.plain.delay()
                assert shop.count(shop.tables.operations) == before + number + 1
        mine.dispose()


def test_two_connections_and_nested_blocks(shop: Service, connection: Connection, block: Block) -> None:
    if shop.runtime.database.dialect == "sqlite":
        pytest.skip("it has one writer")
    with shop.runtime.database.engine.connect() as other:
        with block():
            shop.plain.delay()
            with using(other):
                shop.plain.delay()
                shop.plain.delay()
                connection.execute(text("SELECT 1"))
                assert (written(shop, connection), written(shop, other)) == (2, 1)
            assert written(shop, other) == 2
            shop.plain.delay()
            assert written(shop, connection) == 2
            other.commit()
        connection.rollback()
    assert shop.count(shop.tables.operations) == 2


def test_blocks_inside_each_other_on_one_connection_keep_the_order(shop: Service, connection: Connection) -> None:
    ids = []
    with using(connection):
        ids += [shop.plain.delay().id for _ in range(2)]
        with using(connection):
            ids += [shop.plain.delay().id for _ in range(3)]
        ids += [shop.plain.delay().id for _ in range(2)]
        connection.commit()
    assert [row.id for row in shop.rows(shop.tables.operations)] == ids


def test_two_services_in_one_transaction(shop: Service, sqlite_url: str, connection: Connection) -> None:
    """Each call goes into its own service's tables."""
    with service(str(shop.runtime.database.engine.url.render_as_string(hide_password=False))) as other:
        with using(connection):
            for _ in range(3):
                shop.plain.delay()
                other.plain.delay()
                other.charge.delay("acme")
            connection.commit()
        assert (shop.count(shop.tables.operations), other.count(other.tables.operations)) == (3, 6)


def test_an_asyncio_task_has_a_block_of_its_own(shop: Service) -> None:
    if shop.runtime.database.dialect == "sqlite":
        pytest.skip("it has one writer")
    engine = shop.runtime.database.engine

    async def calls(keep: bool) -> None:
        with engine.connect() as connection, using(connection):
            for _ in range(3):
                shop.plain.delay()
                await asyncio.sleep(0)
            connection.commit() if keep else connection.rollback()

    async def both() -> None:
        await asyncio.gather(calls(True), calls(False))

    asyncio.run(both())
    assert shop.count(shop.tables.operations) == 3


@pytest.mark.postgresql
def test_a_transaction_that_only_the_driver_knows(postgresql_server: str) -> None:
    """SQLAlchemy would tell nobody of its end."""
    with service(postgresql_server) as shop, shop.runtime.database.engine.connect() as connection, using(connection):
        shop.plain.delay()
        connection.commit()
        connection.connection.cursor().execute("SELECT 1")
        shop.plain.delay()
        assert written(shop, connection) == 2


@pytest.mark.postgresql
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "pg8000"])
def test_drivers(driver: str, postgresql_server: str) -> None:
    with service(postgresql_server) as shop:
        engine = create_engine(shop.runtime.database.url.set(drivername=f"postgresql+{driver}"))
        with Session(engine) as session, using(session):
            kept = [shop.charge.delay("acme").id for _ in range(5)]
            savepoint = session.begin_nested()
            shop.charge.delay("acme")
            shop.charge.delay("acme")
            savepoint.rollback()
            assert shop.charge.AsyncResult(kept[-1]).info["state"] == "queued"
            with session.begin_nested():
                kept += [shop.charge.delay("acme").id for _ in range(2)]
            session.commit()
            shop.charge.delay("acme")
            shop.charge.delay("acme")
            session.rollback()
        assert [row.id for row in shop.rows(shop.tables.operations)] == kept
        engine.dispose()


@pytest.mark.postgresql
def test_in_a_two_phase_transaction_nothing_waits(postgresql_server: str) -> None:
    with (
        service(postgresql_server) as shop,
        shop.runtime.database.engine.connect() as connection,
        closing(connection.begin_twophase()),
        using(connection),
    ):
        for number in range(3):
            shop.plain.delay()
            assert written(shop, connection) == number + 1


def test_a_long_block_keeps_no_connection_of_a_session(shop: Service) -> None:
    with Session(shop.runtime.database.engine) as session, using(session):
        for _ in range(5):
            shop.plain.delay()
            shop.plain.delay()
            session.commit()
        gc.collect()
        assert len(collected._of) == 0


@pytest.mark.parametrize("value", ["a\0b", "\ud800", "é\U0001f600", {"k\0": "\0"}, b"\0\xff", float("inf"), 2**80])
def test_whatever_a_call_carries_it_is_the_same_in_a_batch(value: Any, shop: Service, connection: Connection) -> None:
    with using(connection):
        for _ in range(3):
            shop.plain.apply_async((value,), headers={"mine": "a\0b", "half": "\ud800"}, serializer="pickle")
        connection.commit()
    first, *others = shop.rows(shop.tables.payloads, "digest", "body", "headers")
    assert len(others) == 2
    for other in others:
        assert (other.digest, other.body) == (first.digest, first.body)
        assert [other.headers[name] for name in ("mine", "half")] == [first.headers[name] for name in ("mine", "half")]
