"""``using``: what is enqueued belongs to the caller's own transaction."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Column, Integer, Table, create_engine, insert
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import celery_durable
from celery_durable import ConfigurationError, DuplicateOperationError, EnqueueError, using
from tests.integration.enqueue_service import Service, service


def count(shop: Service) -> tuple[int, int, int]:
    tables = shop.tables
    return shop.count(tables.operations), shop.count(tables.payloads), shop.count(tables.wakes)


def test_a_rollback_leaves_nothing(shop: Service) -> None:
    """D11"""
    with Session(shop.runtime.database.engine) as session:
        with using(session):
            result = shop.charge.delay("acme")
            assert result.state == "PENDING"
            assert result.info["state"] == "queued"  # D2: before the commit too
        assert count(shop) == (0, 0, 0)
        session.rollback()
    assert count(shop) == (0, 0, 0)


def test_a_commit_keeps_everything(shop: Service) -> None:
    """D2, D11: the rows of the caller and ours, or none."""
    own = Table(f"{shop.tables.prefix}orders", shop.tables.metadata, Column("id", Integer, primary_key=True))
    own.create(shop.runtime.database.engine)
    with Session(shop.runtime.database.engine) as session, using(session):
        session.execute(insert(own).values(id=81))
        result = shop.charge.apply_async(("acme",), task_id="order-81")
        assert shop.charge.apply_async(("acme",), task_id="order-81").duplicate
        session.commit()
    assert shop.operation(result.id).state == "queued"
    assert count(shop) == (1, 1, 1)


def test_savepoints_are_obeyed(shop: Service) -> None:
    """D11: of a nested savepoint that rolls back, nothing."""
    with Session(shop.runtime.database.engine) as session, using(session):
        kept = shop.charge.delay("acme")
        savepoint = session.begin_nested()
        dropped = shop.charge.delay("acme")
        assert dropped.exists()
        savepoint.rollback()
        assert not dropped.exists()
        with session.begin_nested():
            also = shop.charge.delay("acme")
        session.commit()
    assert {row.id for row in shop.rows(shop.tables.operations)} == {kept.id, also.id}
    assert count(shop) == (2, 2, 2)


def test_connections_and_scoped_sessions(shop: Service) -> None:
    engine = shop.runtime.database.engine
    with engine.connect() as connection:
        with using(connection):
            shop.plain.delay()
        connection.rollback()
        with using(connection):
            shop.plain.delay()
        connection.commit()
    scoped = scoped_session(sessionmaker(engine))
    with using(scoped):
        shop.plain.delay()
    scoped.commit()
    scoped.remove()
    assert shop.count(shop.tables.operations) == 2


def test_the_innermost_holds_and_ends_with_its_block(shop: Service, tmp_path: Path) -> None:
    with service(f"sqlite:///{tmp_path / 'other.sqlite3'}") as _, Session(shop.runtime.database.engine) as outer:
        with using(outer):
            with pytest.raises(RuntimeError), using(outer.connection()):
                raise RuntimeError
            shop.plain.delay()
        outer.rollback()
        shop.plain.delay()
    assert shop.count(shop.tables.operations) == 1


def test_a_duplicate_that_is_refused_leaves_the_transaction_usable(shop: Service) -> None:
    """A1, D11"""
    shop.charge.apply_async(("acme",), task_id="order-81")
    with Session(shop.runtime.database.engine) as session, using(session):
        with pytest.raises(DuplicateOperationError):
            shop.charge.apply_async(("other",), task_id="order-81")
        shop.charge.delay("acme")
        session.commit()
    assert count(shop) == (2, 2, 2)


def test_it_holds_for_its_own_thread_and_asyncio_task(shop: Service) -> None:
    with shop.runtime.database.engine.connect() as connection, using(connection):
        seen: list[bool] = []
        thread = threading.Thread(target=lambda: seen.append(celery_durable.scope.in_callers_transaction()))
        thread.start()
        thread.join()
        assert seen == [False]

    async def inside() -> bool:
        with shop.runtime.database.engine.connect() as connection, using(connection):
            await asyncio.sleep(0)
            return celery_durable.scope.in_callers_transaction()

    async def both() -> tuple[bool, bool]:
        task = asyncio.create_task(inside())
        await asyncio.sleep(0)
        return celery_durable.scope.in_callers_transaction(), await task

    assert asyncio.run(both()) == (False, True)

    async def started_inside() -> tuple[bool, bool, bool]:
        in_force = celery_durable.scope.in_callers_transaction

        async def elsewhere() -> bool:
            return in_force()

        with shop.runtime.database.engine.connect() as connection, using(connection):
            return await asyncio.create_task(elsewhere()), await asyncio.to_thread(in_force), in_force()

    assert asyncio.run(started_inside()) == (False, False, True)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (None, "using(builtins.NoneType): give a SQLAlchemy Session or Connection"),
        ("sqlite:///x", "using(builtins.str)"),
        (create_engine("sqlite://"), "an engine has no transaction"),
        (sessionmaker(), "sessionmaker): give a SQLAlchemy Session"),
    ],
    ids=["none", "text", "engine", "factory"],
)
def test_anything_else_is_refused(target: Any, says: str) -> None:
    with pytest.raises(EnqueueError) as caught, using(target):
        pass
    assert says in str(caught.value)


def test_a_block_is_entered_once(shop: Service) -> None:
    with shop.runtime.database.engine.connect() as connection:
        block = using(connection)
        with block, pytest.raises(RuntimeError, match="make another one for each block"), block:
            pass
        assert not celery_durable.scope.in_callers_transaction()
        with pytest.raises(RuntimeError, match="make another one"), block:
            pass


def test_a_session_on_another_database(shop: Service) -> None:
    """The error says which database, without its password, and which one is needed."""
    other = create_engine("sqlite://")
    with Session(other) as session, using(session), pytest.raises(EnqueueError) as caught:
        shop.plain.delay()
    message = str(caught.value)
    assert "using(Session on sqlite://)" in message
    assert "are missing or not up to date (no such table" in message
    assert "give a session on this service's own database" in message
    other.dispose()


def test_a_session_on_another_services_tables(shop: Service) -> None:
    """Its dispatcher would hand our operations to its workers."""
    with shop.runtime.database.transaction() as connection:
        connection.execute(insert(shop.tables.client).values(client_id="shipping", incarnation="x", created_at=0))
    says = "belongs to client_id 'shipping', this service is 'billing'"
    with (
        shop.runtime.database.engine.connect() as connection,
        using(connection),
        pytest.raises(EnqueueError, match=says),
    ):
        shop.plain.delay()
    assert shop.count(shop.tables.operations) == 0


def test_settings_that_lead_to_another_services_tables(shop: Service) -> None:
    """A35 (of two services on one database): refused by whoever enqueues too, with the remedy."""
    with shop.runtime.database.transaction() as connection:
        connection.execute(insert(shop.tables.client).values(client_id="shipping", incarnation="x", created_at=0))
    says = r"client_id = 'billing': the database .* belongs to client_id 'shipping'; give this service a database"
    for call in (shop.plain.delay, lambda: shop.plain.enqueue_many([()]), lambda: shop.plain.AsyncResult("x").cancel()):
        with pytest.raises(ConfigurationError, match=says):
            call()
    assert shop.count(shop.tables.operations) == 0


def test_a_session_that_cannot_be_used(shop: Service) -> None:
    with (
        Session() as session,
        using(session),
        pytest.raises(EnqueueError, match=r"using\(Session\): it cannot be used"),
    ):
        shop.plain.delay()
    with shop.runtime.database.engine.connect() as connection:
        pass
    with using(connection), pytest.raises(EnqueueError, match="it cannot be used: This Connection is closed"):
        shop.plain.delay()


def test_errors_of_the_callers_own_database_pass_as_they_are(sqlite_url: str) -> None:
    """A caller retries those: a locked database, a deadlock, a lost connection."""
    with service(sqlite_url) as shop:
        hasty = create_engine(shop.runtime.database.url, connect_args={"timeout": 0})
        holding = shop.runtime.database.transaction()
        with holding, hasty.connect() as connection, using(connection), pytest.raises(OperationalError):
            shop.plain.delay()
        hasty.dispose()


def test_uses_that_are_left_in_another_order(shop: Service) -> None:
    """A generator that was dropped leaves its own when it is collected, maybe inside another."""
    engine = shop.runtime.database.engine
    with Session(engine) as first, Session(engine) as second:
        outer, inner = using(first), using(second)
        outer.__enter__()
        inner.__enter__()
        outer.__exit__(None, None, None)
        shop.charge.delay("acme")
        assert (first.in_transaction(), second.in_transaction()) == (False, True)
        inner.__exit__(None, None, None)
        second.rollback()
        shop.charge.delay("acme")
        assert not first.in_transaction()
    assert count(shop) == (1, 1, 1)


@pytest.mark.postgresql
@pytest.mark.parametrize("driver", ["psycopg2", "pg8000"])
def test_the_callers_session_may_have_another_driver(driver: str, postgresql_server: str) -> None:
    """An app keeps the driver that it has: only our own connections are psycopg's."""
    with service(postgresql_server) as shop:
        url = shop.runtime.database.url.set(drivername=f"postgresql+{driver}")
        engine = create_engine(url)
        with Session(engine) as session, using(session):
            assert not shop.charge.apply_async(("acme",), task_id="order-81").duplicate
            assert shop.charge.apply_async(("acme",), task_id="order-81").duplicate
            with pytest.raises(DuplicateOperationError):
                shop.charge.apply_async(("other",), task_id="order-81")
            assert shop.charge.enqueue_many([("acme",)] * 3).count == 3
            celery_durable.limits.set("acme", 3, app=shop.app)
            assert shop.charge.AsyncResult("order-81").cancel() == "cancelled"
            assert shop.charge.AsyncResult("order-81").state == "REVOKED"
            session.commit()
        assert count(shop)[:2] == (4, 4)
        shop.tables.metadata.drop_all(shop.runtime.database.engine)
        with (
            Session(engine) as session,
            using(session),
            pytest.raises(EnqueueError, match="_operations, … are missing"),
        ):
            shop.charge.delay("acme")
        engine.dispose()
