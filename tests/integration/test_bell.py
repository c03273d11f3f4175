"""The bell: what commits work for a dispatcher tells it so, and costs nobody a lock or an error."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from celery_durable import using
from celery_durable.runtime import Runtime
from celery_durable.store import bell
from celery_durable.store.attempts import Attempt, Attempts, Ending
from celery_durable.store.bell import Bell, Listener
from celery_durable.store.database import Database
from celery_durable.store.schema import build_tables
from tests.integration.enqueue_service import Service, service

pytestmark = pytest.mark.postgresql


@pytest.fixture
def shop(postgresql_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(bell, "RING_EVERY_S", 0.0)
    with service(postgresql_server) as shop:
        yield shop


@pytest.fixture
def listener(shop: Service) -> Iterator[Listener]:
    database = Database(shop.runtime.settings.database_url.get_secret_value())
    listener = Listener(database, shop.tables)
    assert listener.wait(), "what was rung before it listened, it cannot know"
    assert not listener.wait()
    yield listener
    database.dispose()


def test_an_enqueue_rings(shop: Service, listener: Listener) -> None:
    shop.plain.delay()
    assert listener.wait()
    assert not listener.wait()


def test_a_batch_rings(shop: Service, listener: Listener) -> None:
    shop.charge.enqueue_many([("acme",), ("other",)])
    assert listener.wait()


def test_a_callers_transaction_never_rings(shop: Service, listener: Listener) -> None:
    """NOTIFY takes a lock of the whole database until the transaction has ended: rule 1 forbids it there."""
    with Session(shop.runtime.database.engine) as session, using(session):
        shop.plain.delay()
        shop.plain.enqueue_many([()])
        session.commit()
    assert not listener.wait()


def test_a_permit_that_is_free_rings(shop: Service, listener: Listener) -> None:
    """A settle with an account has a pass to follow; one without has none."""
    attempts = Attempts(shop.runtime.database, shop.tables)
    for account, rings in (("acme", True), (None, False)):
        task = shop.charge if account else shop.plain
        shop.runtime.bell._silent_until_s = float("inf")
        operation_id = task.delay(*([account] if account else [])).id
        with shop.runtime.database.transaction() as connection:
            operations = shop.tables.operations
            connection.execute(operations.update().where(operations.c.id == operation_id).values(state="admitted"))
        attempt = Attempt(operation_id, 1, 1, "token")
        assert attempts.start(attempt, worker="w", timeout_ms=60_000)
        assert attempts.succeed(attempt, Ending()) == "succeeded"
        assert listener.wait() is rings
    shop.runtime.database.drop_held()


def test_it_rings_seldom(shop: Service, listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was rung looks by itself for longer than the bell keeps silent."""
    monkeypatch.setattr(bell, "RING_EVERY_S", 1e9)
    one = Bell(shop.tables, "postgresql")
    with shop.runtime.database.reading() as connection:
        one.ring(connection.connection.driver_connection)
        assert listener.wait()
        one.ring(connection.connection.driver_connection)
    assert not listener.wait()


def test_a_connection_that_is_lost_is_no_error(shop: Service) -> None:
    database = Database(shop.runtime.settings.database_url.get_secret_value())
    connection = database.held()
    pid = connection.scalar(text("SELECT pg_backend_pid()"))
    with shop.runtime.database.transaction() as other:
        other.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
    Bell(shop.tables, "postgresql").ring(connection.connection.driver_connection)
    database.dispose()


def test_a_listener_connects_anew(shop: Service, listener: Listener) -> None:
    with shop.runtime.database.transaction() as other:
        other.execute(text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"))
    with pytest.raises(Exception, match=r"terminat|clos"):
        listener.wait()
    assert listener.wait(), "it may have missed something"
    shop.plain.delay()
    assert listener.wait()


def test_each_client_of_a_database_hears_its_own(shop: Service, listener: Listener) -> None:
    other = Runtime(shop.runtime.settings, shop.runtime.database, build_tables("other_"))
    with shop.runtime.database.reading() as connection:
        other.bell.ring(connection.connection.driver_connection)
    assert not listener.wait()


def test_it_is_its_own_transaction_and_waits_for_no_disk(shop: Service) -> None:
    """The lock is held for as long as the commit takes."""
    with shop.runtime.database.reading() as connection:
        before = connection.scalar(text("SELECT current_setting('synchronous_commit')"))
        shop.runtime.bell.ring(connection.connection.driver_connection)
        assert connection.scalar(text("SELECT current_setting('synchronous_commit')")) == before == "on"
    assert shop.runtime.bell._silent_until_s <= time.monotonic()
