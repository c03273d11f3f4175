"""``using`` with what is not SQLAlchemy's: connections of psycopg, psycopg2, sqlite3 and Django."""

from __future__ import annotations

import sqlite3
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import django
import psycopg
import psycopg2.extras
import pytest
from django.conf import settings
from django.db import connections
from django.db import transaction as django_transaction
from django.db.utils import OperationalError as DjangoOperationalError
from psycopg.rows import dict_row
from sqlalchemy import insert

import celery_durable
from celery_durable import DuplicateOperationError, EnqueueError, using
from celery_durable.permits.state import AccountState
from celery_durable.runtime import Runtime
from celery_durable.store.clock import now_ms
from tests.integration.enqueue_service import Service, service


@dataclass
class Guest:
    """A connection of another library's, in a transaction or about to begin one."""

    connection: Any
    commit: Callable[[], object]
    rollback: Callable[[], object]

    def execute(self, sql: str) -> list[Any]:
        """Executes it by the connection's own means."""
        with closing(self.connection.cursor()) as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall()) if cursor.description else []


def _guest(connection: Any) -> Guest:
    return Guest(connection, connection.commit, connection.rollback)


def _conninfo(runtime: Runtime) -> str:
    return runtime.database.url.set(drivername="postgresql").render_as_string(hide_password=False)


@contextmanager
def by_psycopg(runtime: Runtime) -> Iterator[Guest]:
    with closing(psycopg.connect(_conninfo(runtime))) as connection:
        yield _guest(connection)


@contextmanager
def by_psycopg_with_other_rows(runtime: Runtime) -> Iterator[Guest]:
    """Rows, cursors and values of its own: none of them is taken from, or left to, the caller."""
    with closing(psycopg.connect(_conninfo(runtime), row_factory=dict_row)) as connection:
        connection.cursor_factory = psycopg.ClientCursor
        connection.adapters.register_loader("json", psycopg.types.string.TextLoader)
        yield _guest(connection)


@contextmanager
def by_psycopg2(runtime: Runtime) -> Iterator[Guest]:
    with closing(psycopg2.connect(_conninfo(runtime))) as connection:
        psycopg2.extras.register_default_json(connection, loads=lambda text: text)
        yield _guest(connection)


@contextmanager
def by_sqlite3(runtime: Runtime) -> Iterator[Guest]:
    with closing(sqlite3.connect(str(runtime.database.url.database))) as connection:
        connection.row_factory = lambda _cursor, row: {"row": row}
        yield _guest(connection)


@contextmanager
def by_sqlite3_in_autocommit(runtime: Runtime) -> Iterator[Guest]:
    with closing(sqlite3.connect(str(runtime.database.url.database), isolation_level=None)) as connection:
        connection.execute("BEGIN")
        yield _guest(connection)


@contextmanager
def by_django(runtime: Runtime) -> Iterator[Guest]:
    """In an atomic block."""
    alias = _django_alias(runtime)
    atomic = django_transaction.atomic(using=alias)
    connection = connections[alias]
    atomic.__enter__()
    left: list[str] = []

    def leave(how: str) -> None:
        left.append(how)
        django_transaction.set_rollback(how == "rollback", using=alias)
        atomic.__exit__(None, None, None)

    try:
        yield Guest(connection, lambda: leave("commit"), lambda: leave("rollback"))
    finally:
        if not left:
            leave("rollback")
        connection.close()


def _django_alias(runtime: Runtime) -> str:
    if not settings.configured:
        settings.configure(USE_TZ=True, DATABASES={})
        django.setup()
    url, alias = runtime.database.url, uuid.uuid4().hex
    own = {
        "ENGINE": f"django.db.backends.{runtime.database.dialect}"
        + ("3" if runtime.database.dialect == "sqlite" else ""),
        "NAME": url.database,
        "USER": url.username or "",
        "PASSWORD": url.password or "",
        "HOST": url.host or "",
        "PORT": str(url.port or ""),
    }
    connections.databases[alias] = connections.configure_settings({"default": {}, alias: own})[alias]
    return alias


POSTGRESQL = (by_psycopg, by_psycopg_with_other_rows, by_psycopg2, by_django)
SQLITE = (by_sqlite3, by_sqlite3_in_autocommit, by_django)
KINDS = [pytest.param(one, "sqlite_url", id=f"sqlite {one.__name__}") for one in SQLITE] + [
    pytest.param(one, "postgresql_server", id=f"postgresql {one.__name__}", marks=pytest.mark.postgresql)
    for one in POSTGRESQL
]


@pytest.fixture
def shop(request: pytest.FixtureRequest) -> Iterator[Service]:
    with service(request.getfixturevalue(request.param)) as shop:
        yield shop


on_every_kind = pytest.mark.parametrize(("kind", "shop"), KINDS, indirect=["shop"])
Kind = Callable[[Runtime], Any]


@on_every_kind
def test_it_commits_with_the_caller(shop: Service, kind: Kind) -> None:
    """D11: the rows of the caller and ours, or none; the caller's own means work before, between and after."""
    own = f"{shop.tables.prefix}orders"
    with kind(shop.runtime) as guest:
        guest.execute(f"CREATE TABLE {own} (id integer)")
        with using(guest.connection):
            guest.execute(f"INSERT INTO {own} VALUES (81)")
            result = shop.charge.apply_async(("acme", "wf"), task_id="order-81", countdown=60)
            assert shop.charge.apply_async(("acme", "wf"), task_id="order-81", countdown=60).duplicate
            assert shop.plain.enqueue_many([(1,), (2,)]).count == 2
            shop.plain.delay(3)
            guest.execute(f"INSERT INTO {own} VALUES (82)")
        assert shop.count(shop.tables.operations) == 0
        guest.commit()
    assert shop.operation(result.id).state == "scheduled"
    assert (shop.count(shop.tables.operations), shop.count(shop.tables.payloads)) == (4, 4)
    with kind(shop.runtime) as guest:
        assert len(guest.execute(f"SELECT id FROM {own}")) == 2
        guest.execute(f"DROP TABLE {own}")
        guest.commit()


@on_every_kind
def test_a_rollback_leaves_nothing(shop: Service, kind: Kind) -> None:
    with kind(shop.runtime) as guest:
        with using(guest.connection):
            shop.charge.delay("acme")
            celery_durable.pause("tenant:acme", app=shop.app)
        guest.rollback()
    for table in (shop.tables.operations, shop.tables.payloads, shop.tables.wakes, shop.tables.outbox):
        assert shop.count(table) == 0


@on_every_kind
def test_what_is_read_is_as_it_is(shop: Service, kind: Kind) -> None:
    """JSON, numbers and texts, whatever the caller's own cursors make of them."""
    with shop.runtime.database.transaction() as connection:
        state = AccountState("tenant:acme").to_json()
        values = {"account": "tenant:acme", "state": state, "blocked": {"wf": "group_limit"}, "due_at": now_ms()}
        connection.execute(insert(shop.tables.accounts).values(values))
    with kind(shop.runtime) as guest:
        with using(guest.connection):
            result = shop.charge.delay("acme", "wf", amount=5)
            found = celery_durable.status(result.id, app=shop.app)
            assert (found.state, found.reason, found.attempt) == ("queued", "group_limit", 1)
            assert result.info["reason"] == "group_limit"
            assert celery_durable.usage("tenant:acme", app=shop.app)[0].waiting == 1
            assert celery_durable.cancel(result.id, app=shop.app)
            assert result.state == "REVOKED"
        guest.rollback()


@on_every_kind
def test_a_duplicate_that_is_refused_leaves_the_transaction_usable(shop: Service, kind: Kind) -> None:
    shop.charge.apply_async(("acme",), task_id="order-81")
    with kind(shop.runtime) as guest:
        with using(guest.connection):
            with pytest.raises(DuplicateOperationError):
                shop.charge.apply_async(("other",), task_id="order-81")
            shop.charge.delay("acme")
        guest.commit()
    assert shop.count(shop.tables.operations) == 2


@pytest.mark.parametrize("shop", ["sqlite_url"], indirect=True)
def test_savepoints_of_django(shop: Service) -> None:
    """D11: of a nested block that rolls back, nothing."""
    with by_django(shop.runtime) as guest:
        with using(guest.connection):
            kept = shop.plain.delay(1)
            with django_transaction.atomic(using=guest.connection.alias):
                shop.plain.delay(2)
                django_transaction.set_rollback(True, using=guest.connection.alias)
            also = shop.plain.delay(3)
        guest.commit()
    assert {row.id for row in shop.rows(shop.tables.operations)} == {kept.id, also.id}


@pytest.mark.parametrize("shop", ["postgresql_server"], indirect=True)
@pytest.mark.postgresql
def test_a_psycopg_connection_in_autocommit(shop: Service) -> None:
    """Refused, unless a block of its own has begun a transaction; savepoints of its blocks are obeyed."""
    with closing(psycopg.connect(_conninfo(shop.runtime), autocommit=True)) as connection:
        with pytest.raises(EnqueueError, match=r"in autocommit.*with connection.transaction"), using(connection):
            pass
        with connection.transaction(), using(connection):
            kept = shop.plain.delay(1)
            with connection.transaction(force_rollback=True):
                shop.plain.delay(2)
        assert {row.id for row in shop.rows(shop.tables.operations)} == {kept.id}
    with closing(psycopg2.connect(_conninfo(shop.runtime))) as other:
        other.autocommit = True
        with pytest.raises(EnqueueError, match="in autocommit"), using(other):
            pass


@pytest.mark.parametrize("shop", ["sqlite_url"], indirect=True)
def test_what_would_commit_each_statement_by_itself_is_refused(shop: Service) -> None:
    url = str(shop.runtime.database.url.database)
    connection = sqlite3.connect(url, isolation_level=None)
    with closing(connection), pytest.raises(EnqueueError, match=r"in autocommit.*BEGIN"), using(connection):
        pass
    django = connections[_django_alias(shop.runtime)]
    with pytest.raises(EnqueueError, match=r"Django's connection .* transaction.atomic"), using(django):
        pass
    django.close()


@pytest.mark.parametrize("shop", ["sqlite_url"], indirect=True)
def test_a_transaction_that_ends_inside_the_block(shop: Service) -> None:
    """What follows would be committed statement by statement."""
    with by_sqlite3_in_autocommit(shop.runtime) as guest, using(guest.connection):
        shop.plain.delay(1)
        guest.commit()
        with pytest.raises(EnqueueError, match="in autocommit"):
            shop.plain.delay(2)
    assert shop.count(shop.tables.operations) == 1


@pytest.mark.parametrize("shop", ["sqlite_url"], indirect=True)
def test_a_broken_transaction_of_django_takes_nothing(shop: Service) -> None:
    """Its outer block will be rolled back, so a call that seemed to succeed would be lost."""
    with by_django(shop.runtime) as guest, using(guest.connection):
        django_transaction.set_rollback(True, using=guest.connection.alias)
        with pytest.raises(EnqueueError, match="until the end of the 'atomic' block"):
            shop.plain.delay()


@pytest.mark.parametrize(
    ("kind", "error"), [(by_sqlite3, sqlite3.OperationalError), (by_django, DjangoOperationalError)]
)
@pytest.mark.parametrize("shop", ["sqlite_url"], indirect=True)
def test_the_databases_errors_are_those_that_the_caller_knows(
    shop: Service, kind: Kind, error: type[Exception]
) -> None:
    with kind(shop.runtime) as guest, using(guest.connection):
        guest.execute("PRAGMA busy_timeout=0")
        with shop.runtime.database.engine.begin() as other:
            other.execute(insert(shop.tables.wakes).values(account="held"))
            with pytest.raises(error, match="locked"):
                shop.plain.delay()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sqlite3's autocommit attribute came with Python 3.12")
@pytest.mark.parametrize("shop", ["sqlite_url"], indirect=True)
def test_the_autocommit_attribute_of_sqlite3(shop: Service) -> None:
    connection: Any = sqlite3.connect(str(shop.runtime.database.url.database), autocommit=True)  # type: ignore[call-overload,unused-ignore]
    with closing(connection), pytest.raises(EnqueueError, match=r"in autocommit.*BEGIN"), using(connection):
        pass


@pytest.mark.parametrize("shop", ["sqlite_url"], indirect=True)
def test_another_services_database_is_refused(shop: Service) -> None:
    with shop.runtime.database.transaction() as connection:
        values = {"client_id": "other", "incarnation": "i", "created_at": 1}
        connection.execute(insert(shop.tables.client).values(values))
    refused = pytest.raises(EnqueueError, match="belongs to client_id 'other'")
    with by_sqlite3(shop.runtime) as guest, using(guest.connection), refused:
        shop.plain.delay()
