"""Which client a database belongs to, and which database it is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import select

from celery_durable.errors import ConfigurationError
from celery_durable.store.accounts import client_identity
from tests.dispatching import Service


def test_one_database_belongs_to_one_client(service: Service) -> None:
    with service.database.transaction() as connection:
        assert client_identity(connection, service.tables, "billing") == ("billing", service.incarnation)
        with pytest.raises(ConfigurationError, match="belongs to client_id 'billing'"):
            client_identity(connection, service.tables, "shipping")


def test_processes_that_race_agree_on_one_incarnation(database_url: str) -> None:
    service = Service(database_url)
    with service.database.transaction() as connection:
        connection.execute(service.tables.client.delete())

    def identity(own: Service) -> str:
        with own.database.transaction() as connection:
            return client_identity(connection, own.tables, "billing")[1]

    with ThreadPoolExecutor(4) as threads:
        found = set(threads.map(identity, [service.again() for _ in range(4)]))
    assert len(found) == 1
    with service.database.reading() as connection:
        assert connection.execute(select(service.tables.client.c.incarnation)).scalar_one() == found.pop()
    service.close()
