"""Fixtures that several modules use: a service's database, and what reads a topic as the holder does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Connection

from celery_durable import using
from tests.dispatching import Service
from tests.integration import enqueue_service
from tests.integration.enqueue_service import Block
from tests.integration.enqueue_service import Service as Shop
from tests.kafka_parts import Owner, Tables, tables_in


@pytest.fixture
def service(database_url: str) -> Iterator[Service]:
    """A service's database, on SQLite and on PostgreSQL."""
    service = Service(database_url)
    yield service
    service.close()


@pytest.fixture
def postgresql(postgresql_url: str) -> Iterator[Service]:
    """For what SQLite, with its one writer, cannot show."""
    service = Service(postgresql_url)
    yield service
    service.close()


@pytest.fixture
def tables(sqlite_url: str) -> Iterator[Tables]:
    """A database with an outbox and a table of offsets."""
    with tables_in(sqlite_url) as tables:
        yield tables


@pytest.fixture
def owners() -> Iterator[list[Owner]]:
    """The owners that a test puts here leave their group at the end."""
    owners: list[Owner] = []
    yield owners
    for owner in owners:
        owner.reader.close()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgresql)])
def shop(request: pytest.FixtureRequest) -> Iterator[Shop]:
    """A service with tasks, on SQLite and on PostgreSQL."""
    url = request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgresql_server")
    with enqueue_service.service(url) as shop:
        yield shop


@pytest.fixture
def connection(shop: Shop) -> Iterator[Connection]:
    """A caller's own connection to the database of ``shop``."""
    with shop.runtime.database.engine.connect() as connection:
        yield connection


@pytest.fixture
def block(connection: Connection, shop: Shop) -> Iterator[Block]:
    """Blocks on it."""

    @contextmanager
    def block() -> Iterator[None]:
        with using(connection):
            shop.plain.delay("first")
            yield

    yield block
    connection.rollback()
