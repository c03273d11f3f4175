"""``async with using(…)``: SQLAlchemy's asynchronous sessions and connections."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Column, Integer, Table, func, insert, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

import celery_durable
from celery_durable import DuplicateOperationError, EnqueueError, using
from tests.integration.enqueue_service import Service, service

DRIVERS = {
    "aiosqlite": ("sqlite_url", "sqlite+aiosqlite"),
    "psycopg": ("postgresql_server", "postgresql+psycopg"),
    "asyncpg": ("postgresql_server", "postgresql+asyncpg"),
}


@pytest.fixture(params=[pytest.param(name, marks=() if "lite" in name else pytest.mark.postgresql) for name in DRIVERS])
def scene(request: pytest.FixtureRequest) -> Iterator[tuple[Service, str]]:
    """A service, and the URL of its database for an asynchronous driver."""
    fixture, driver = DRIVERS[request.param]
    with service(request.getfixturevalue(fixture)) as shop:
        yield shop, shop.runtime.database.url.set(drivername=driver).render_as_string(hide_password=False)


NOW = re.escape("only code inside `await session.run_sync")


def run(scene: tuple[Service, str], body: Callable[[Service, AsyncSession], Awaitable[None]]) -> Service:
    """Runs ``body`` with a session. Returns the service."""

    async def main() -> None:
        engine = create_async_engine(scene[1])
        try:
            async with AsyncSession(engine, expire_on_commit=False) as session:
                await body(scene[0], session)
        finally:
            await engine.dispose()

    asyncio.run(main())
    return scene[0]


async def _fail_in(outer: Any, inner: Any, shop: Service) -> None:
    async with outer, inner:
        shop.charge.delay("acme")
        raise KeyError


def ids(shop: Service) -> set[str]:
    """The operations that there are."""
    return {row.id for row in shop.rows(shop.tables.operations)}


def test_it_commits_with_the_session(scene: tuple[Service, str]) -> None:
    """D11: the rows of the caller and ours, or none; what is enqueued is there for the caller's next statement."""
    shop = scene[0]
    own = Table(f"{shop.tables.prefix}orders", shop.tables.metadata, Column("id", Integer, primary_key=True))
    own.create(shop.runtime.database.engine)
    expected: set[str] = set()

    async def body(shop: Service, session: AsyncSession) -> None:
        async with using(session):
            await session.execute(insert(own).values(id=81))
            results = [
                shop.charge.delay("acme"),
                shop.charge.apply_async(("acme",), task_id="order-81", countdown=60),
                shop.charge.apply_async(("acme",), task_id="order-81", countdown=60),
            ]
            expected.update(result.id for result in results)
            expected.update(shop.plain.enqueue_many([(1,), (2,)]).ids)
            seen = await session.scalar(select(func.count()).select_from(shop.tables.operations))
            assert seen == 4
            expected.add(shop.plain.delay(3).id)
        assert ids(shop) == set()
        await session.commit()

    run(scene, body)
    assert ids(shop) == expected
    assert len(expected) == 5
    assert shop.operation("order-81").state == "scheduled"


def test_a_commit_inside_the_block_writes_them_too(scene: tuple[Service, str]) -> None:
    """Afterwards the block has no transaction."""

    async def body(shop: Service, session: AsyncSession) -> None:
        async with using(session):
            shop.plain.delay()
            await session.commit()
            assert shop.count(shop.tables.operations) == 1
            with pytest.raises(EnqueueError, match="its transaction is over"):
                shop.plain.delay()
        async with using(session):
            shop.plain.delay()
        await session.commit()

    assert len(ids(run(scene, body))) == 2


def test_a_rollback_leaves_nothing(scene: tuple[Service, str]) -> None:
    async def body(shop: Service, session: AsyncSession) -> None:
        async with using(session):
            shop.charge.delay("acme")
        await session.rollback()
        with pytest.raises(KeyError):
            await _fail_in(session.begin(), using(session), shop)

    assert ids(run(scene, body)) == set()


def test_savepoints_are_obeyed(scene: tuple[Service, str]) -> None:
    """D11"""
    kept: set[str] = set()

    async def body(shop: Service, session: AsyncSession) -> None:
        async with session.begin(), using(session):
            kept.add(shop.plain.delay(1).id)
            with pytest.raises(KeyError):
                await _fail_in(session.begin_nested(), nullcontext(), shop)
            async with session.begin_nested():
                kept.add(shop.plain.delay(3).id)
            kept.add(shop.plain.delay(4).id)

    assert ids(run(scene, body)) == kept
    assert len(kept) == 3


def test_what_only_the_database_can_refuse_is_told_as_the_block_ends(scene: tuple[Service, str]) -> None:
    """A1: nothing of the calls is written, and the transaction can go on."""
    scene[0].charge.apply_async(("acme",), task_id="order-81")

    async def body(shop: Service, session: AsyncSession) -> None:
        async def refused() -> None:
            async with using(session):
                shop.charge.delay("new")
                shop.charge.apply_async(("other",), task_id="order-81")

        with pytest.raises(DuplicateOperationError, match="order-81"):
            await refused()
        async with using(session):
            shop.charge.apply_async(("acme",), task_id="order-82")
        await session.commit()

    assert ids(run(scene, body)) == {"order-81", "order-82"}
    assert scene[0].count(scene[0].tables.payloads) == 2


def test_what_needs_an_answer_is_for_run_sync(scene: tuple[Service, str]) -> None:
    async def body(shop: Service, session: AsyncSession) -> None:
        async with using(session):
            result = shop.charge.delay("acme")
            with pytest.raises(EnqueueError, match=NOW):
                celery_durable.status(result.id, app=shop.app)
            with pytest.raises(EnqueueError, match=NOW):
                celery_durable.pause("tenant:acme", app=shop.app)
            state = await session.run_sync(lambda _: celery_durable.status(result.id, app=shop.app).state)
            assert state == "queued"
            assert await session.run_sync(lambda _: celery_durable.cancel(result.id, app=shop.app))
            also = await session.run_sync(lambda _: shop.plain.apply_async(task_id="also"))
            assert not also.duplicate
        await session.commit()

    shop = run(scene, body)
    assert shop.operation("also").state == "admitted"
    assert len(ids(shop)) == 2


def test_connections(scene: tuple[Service, str]) -> None:
    """One that has not begun begins as the block does."""

    async def main() -> None:
        engine = create_async_engine(scene[1])
        async with engine.connect() as connection:
            async with using(connection):
                scene[0].plain.delay(1)
            await connection.commit()
        async with engine.begin() as connection, using(connection):
            scene[0].plain.delay(2)
        with pytest.raises(EnqueueError, match="not connected yet"):
            async with using(engine.connect()):
                pass
        async with engine.connect() as connection:
            with pytest.raises(EnqueueError, match=r"write .async with"), using(connection):
                pass
        await engine.dispose()

    asyncio.run(main())
    assert len(ids(scene[0])) == 2


def test_a_connection_in_autocommit_is_refused(scene: tuple[Service, str]) -> None:
    """However it came to be: nothing could be rolled back, and on SQLite nothing would be committed."""

    async def main() -> None:
        engines = create_async_engine(scene[1]), create_async_engine(scene[1], isolation_level="AUTOCOMMIT")
        options: tuple[dict[str, Any], ...] = {"isolation_level": "AUTOCOMMIT"}, {}
        for engine, option in zip(engines, options, strict=True):
            async with engine.connect() as connection:
                await connection.execution_options(**option)
                with pytest.raises(EnqueueError, match="isolation level is AUTOCOMMIT"):
                    await using(connection).__aenter__()
            await engine.dispose()

    asyncio.run(main())


def test_calls_after_a_failed_statement_are_not_lost_in_silence(scene: tuple[Service, str]) -> None:
    """On PostgreSQL the server rolls such a transaction back, also where COMMIT is asked for."""

    async def body(shop: Service, session: AsyncSession) -> None:
        async with using(session):
            with pytest.raises(DBAPIError):
                await session.execute(text("SELECT * FROM nothing"))
            with suppress(DBAPIError):
                shop.plain.delay()
                await session.flush()
        committed = False
        with suppress(DBAPIError, EnqueueError):
            await session.commit()
            committed = True
        await session.rollback()
        assert shop.count(shop.tables.operations) == committed

    with suppress(DBAPIError):  # asyncpg's driver does not tell the transaction's state: its error leaves the block
        run(scene, body)


def test_a_sync_target_in_an_async_block(shop: Service) -> None:
    async def main() -> None:
        with shop.runtime.database.engine.begin() as connection:
            async with using(connection):
                assert shop.plain.apply_async(task_id="x").exists()

    asyncio.run(main())
    assert ids(shop) == {"x"}


def test_more_calls_than_a_batch_takes(scene: tuple[Service, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them wait, then all are written or none."""
    monkeypatch.setattr("celery_durable.collected.BATCH_ROWS", 3)
    scene[0].plain.apply_async(("mine",), task_id="known")

    async def body(shop: Service, session: AsyncSession) -> None:
        async with using(session):
            for number in range(7):
                shop.plain.delay(number)
            shop.charge.enqueue_many([("acme",)] * 4, batch_rows=2)
        await session.commit()

        async def refused() -> None:
            async with using(session):
                for number in range(7):
                    shop.plain.delay(number)
                shop.plain.apply_async(("other",), task_id="known")

        with pytest.raises(DuplicateOperationError):
            await refused()
        await session.commit()

    assert len(ids(run(scene, body))) == 1 + 11


def test_a_delay_counts_from_the_call(scene: tuple[Service, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it waits, and however often it is tried."""
    now_s = [1_000.0]
    monkeypatch.setattr("celery_durable.collected.time", SimpleNamespace(monotonic=lambda: now_s[0]))

    async def body(shop: Service, session: AsyncSession) -> None:
        async with using(session):
            result = shop.charge.apply_async(("acme",), countdown=100, expires=200)
            now_s[0] += 60
            found = await session.run_sync(lambda _: celery_durable.status(result.id, app=shop.app))
        assert found.due_at is not None
        assert found.expires_at is not None
        assert (found.due_at - found.enqueued_at).total_seconds() == pytest.approx(40, abs=1)
        assert (found.expires_at - found.enqueued_at).total_seconds() == pytest.approx(140, abs=1)

    run(scene, body)


def test_nested_blocks(scene: tuple[Service, str]) -> None:
    """On the same session, and on another one: each call goes where it was made, and savepoints stay obeyed."""
    kept: set[str] = set()

    async def body(shop: Service, session: AsyncSession) -> None:
        async with session.begin(), using(session):
            kept.add(shop.plain.delay(1).id)
            async with using(session):
                kept.add(shop.plain.delay(2).id)
            with pytest.raises(KeyError):
                await _fail_in(session.begin_nested(), nullcontext(), shop)
            kept.add(shop.plain.delay(3).id)

    assert ids(run(scene, body)) == kept
    assert len(kept) == 3


def test_a_block_that_is_cancelled(scene: tuple[Service, str]) -> None:
    """What it collected belongs to a transaction that its session rolls back; nothing goes on."""

    async def body(shop: Service, session: AsyncSession) -> None:
        enqueued = asyncio.Event()

        async def endless() -> None:
            async with session.begin(), using(session):
                shop.plain.delay()
                enqueued.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(endless())
        await enqueued.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not celery_durable.scope.in_callers_transaction()

    assert ids(run(scene, body)) == set()


def test_tasks_that_it_starts_are_outside(scene: tuple[Service, str]) -> None:
    """What an asyncio task enqueues that the block has started commits by itself."""

    async def body(shop: Service, session: AsyncSession) -> None:
        async def other() -> Any:
            return shop.plain.apply_async(task_id="other")

        async with using(session):
            await asyncio.create_task(other())
            shop.plain.apply_async(task_id="mine")
        await session.rollback()

    assert ids(run(scene, body)) == {"other"}
