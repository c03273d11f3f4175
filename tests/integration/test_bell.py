"""The bell: what commits work for a dispatcher tells it so, and costs nobody a lock or an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from celery.exceptions import SoftTimeLimitExceeded
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
    assert listener.wait() == {"delivery"}
    assert not listener.wait()


def test_a_batch_rings(shop: Service, listener: Listener) -> None:
    shop.charge.enqueue_many([("acme",), ("other",)])
    assert listener.wait() == {"passes"}


def test_a_callers_transaction_never_rings(shop: Service, listener: Listener) -> None:
    """NOTIFY takes a lock of the whole database until the transaction has ended: rule 1 forbids it there."""
    with Session(shop.runtime.database.engine) as session, using(session):
        shop.plain.delay()
        shop.plain.delay()
        shop.plain.enqueue_many([()])
        session.commit()
    assert not listener.wait()


def test_a_permit_that_is_free_rings(shop: Service, listener: Listener) -> None:
    """A settle with an account has a pass to follow; one without has none."""
    attempts = Attempts(shop.runtime.database, shop.tables, shop.runtime.bell)
    for account, rings in (("acme", True), (None, False)):
        task = shop.charge if account else shop.plain
        with shop.runtime.database.transaction() as connection, using(connection):
            operation_id = task.delay(*([account] if account else [])).id
        with shop.runtime.database.transaction() as connection:
            operations = shop.tables.operations
            connection.execute(operations.update().where(operations.c.id == operation_id).values(state="admitted"))
        attempt = Attempt(operation_id, 1, 1, "token")
        assert attempts.start(attempt, worker="w", timeout_ms=60_000)
        assert attempts.succeed(attempt, Ending()) == "succeeded"
        assert listener.wait() == ({"passes"} if rings else set())
    shop.runtime.database.drop_held()


def test_it_rings_seldom(shop: Service, listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was rung looks by itself for longer than the bell keeps silent."""
    monkeypatch.setattr(bell, "RING_EVERY_S", 1e9)
    one = Bell(shop.runtime.database, shop.tables)
    one.ring("passes")
    assert listener.wait()
    one.ring("passes")
    assert not listener.wait()
    one.ring("delivery")
    assert listener.wait() == {"delivery"}


@pytest.mark.parametrize("held", [False, True])
def test_a_connection_that_is_lost_is_no_error(shop: Service, held: bool) -> None:
    database = Database(shop.runtime.settings.database_url.get_secret_value())
    with database.reading() as connection:
        pids = [connection.scalar(text("SELECT pg_backend_pid()"))]
    pids.append(database.held().scalar(text("SELECT pg_backend_pid()")))
    with shop.runtime.database.transaction() as other:
        for pid in pids:
            other.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
    Bell(database, shop.tables).ring("passes", held=held)
    with database.autocommit() if held else database.reading() as connection:
        assert connection.scalar(text("SELECT 1")) == 1
    database.dispose()


def test_a_stop_that_comes_while_it_rings_is_not_lost(shop: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A soft time limit is raised wherever the body is: here it is in the ring of a task that it enqueues."""

    def torn(*_: object, **__: object) -> None:
        raise SoftTimeLimitExceeded

    with monkeypatch.context() as patch:
        patch.setattr(psycopg.Cursor, "execute", torn)
        with pytest.raises(SoftTimeLimitExceeded):
            shop.runtime.bell.ring("passes")
        with pytest.raises(SoftTimeLimitExceeded):
            shop.plain.delay()


def test_a_listener_connects_anew(shop: Service, listener: Listener) -> None:
    pid = listener._database.held().scalar(text("SELECT pg_backend_pid()"))
    with shop.runtime.database.transaction() as other:
        other.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
    with pytest.raises(Exception, match=r"terminat|clos"):
        listener.wait()
    assert listener.wait(), "it may have missed something"
    shop.plain.delay()
    assert listener.wait()


def test_each_client_of_a_database_hears_its_own(shop: Service, listener: Listener) -> None:
    Runtime(shop.runtime.settings, shop.runtime.database, build_tables("other_")).bell.ring("passes")
    assert not listener.wait()


@pytest.mark.parametrize("held", [False, True])
def test_it_is_its_own_transaction_and_waits_for_no_disk(
    shop: Service, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is held for as long as the commit takes."""
    seen: list[tuple[str, bool]] = []
    execute = psycopg.Cursor.execute

    def noted(cursor: Any, query: Any, *args: Any, **options: Any) -> Any:
        seen.append((str(query), cursor.connection.autocommit))
        return execute(cursor, query, *args, **options)

    shop.plain.delay()
    monkeypatch.setattr(psycopg.Cursor, "execute", noted)
    shop.runtime.bell.ring("passes", held=held)
    [(statement, is_autocommit)] = seen
    assert is_autocommit
    assert "set_config('synchronous_commit', 'off', true), pg_notify" in statement
    shop.runtime.database.drop_held()
