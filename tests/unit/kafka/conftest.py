"""What the tests of the tables share that Kafka's parts use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_durable.store.database import Database


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """An empty database, on SQLite and on PostgreSQL."""
    database = Database(database_url)
    yield database
    database.dispose()
