"""A service for tests of the enqueue side: an app with tables of its own, no broker, no result backend."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from celery import Celery
from sqlalchemy import Connection, Row, Table, func, insert, select

from celery_durable import DurableTask
from celery_durable.runtime import Runtime, runtime_of
from celery_durable.store.schema import Tables

NOWHERE = "redis://127.0.0.1:1/0"
"""Nothing listens there: enqueue must need neither (cases C19 and C24)."""


@dataclass(frozen=True)
class Service:
    """The app, its tables and its tasks."""

    app: Celery
    runtime: Runtime
    charge: DurableTask[..., Any]
    """account ``tenant:{tenant}``, group ``{workflow}``, limit 5."""
    plain: DurableTask[..., Any]
    """No account."""

    @property
    def tables(self) -> Tables:
        """The service's tables."""
        return self.runtime.tables

    def rows(self, table: Table, *columns: str) -> list[Row[Any]]:
        """All committed rows of a table, in order."""
        with self.runtime.database.reading() as connection:
            chosen = [table.c[name] for name in columns] or [table]
            return list(connection.execute(select(*chosen).order_by(next(iter(table.primary_key)))))

    def count(self, table: Table, connection: Connection | None = None) -> int:
        """How many committed rows the table has; or how many the connection sees."""
        statement = select(func.count()).select_from(table)
        if connection is not None:
            return int(connection.execute(statement).scalar_one())
        with self.runtime.database.reading() as own:
            return int(own.execute(statement).scalar_one())

    def operation(self, operation_id: str) -> Row[Any]:
        """One committed operation."""
        operations = self.tables.operations
        with self.runtime.database.reading() as connection:
            return connection.execute(select(operations).where(operations.c.id == operation_id)).one()


def body_of_charge(tenant: str, workflow: str = "wf", amount: int = 1) -> int:
    return amount


def body_of_plain(value: Any = None) -> Any:
    return value


@contextmanager
def service(url: str, **settings: Any) -> Iterator[Service]:
    """A service whose tables have a prefix of their own in the database."""
    app = Celery("billing", broker=NOWHERE, backend=NOWHERE, set_as_current=False)
    app.conf.durable = {
        "client_id": "billing",
        "database_url": url,
        "table_prefix": f"t{uuid.uuid4().hex[:8]}_",
        **settings,
    }
    runtime = runtime_of(app)
    runtime.tables.metadata.create_all(runtime.database.engine)
    with runtime.database.transaction() as connection:
        connection.execute(
            insert(runtime.tables.counters), [{"name": name, "value": 0} for name in ("report_seq", "command_seq")]
        )
    options: dict[str, Any] = {"base": DurableTask, "shared": False, "lazy": False}
    charge = app.task(name="charge", account="tenant:{tenant}", group="{workflow}", limit=5, **options)(body_of_charge)
    plain = app.task(name="plain", **options)(body_of_plain)
    try:
        yield Service(app, runtime, charge, plain)
    finally:
        runtime.tables.metadata.drop_all(runtime.database.engine)
        runtime.database.dispose()
        app.close()


Block = Callable[[], AbstractContextManager[None]]
"""A block of ``using`` in which the next call is collected; the one before it was ``"first"``."""


def written(shop: Service, connection: Connection) -> int:
    """How many operations are written in the connection's transaction, asked without SQLAlchemy."""
    cursor = connection.connection.cursor()
    cursor.execute(f"SELECT count(*) FROM {shop.tables.operations.name}")
    [number] = cursor.fetchone()
    cursor.close()
    return int(number)


def fail_after_a_call(shop: Service, block: Block, act: Callable[[], object] = lambda: None) -> None:
    """A block that an exception leaves: ``act``'s, or :class:`KeyError`."""
    with block():
        shop.plain.delay()
        act()
        raise KeyError
