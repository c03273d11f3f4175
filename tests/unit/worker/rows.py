"""Operations written straight into a database, as if a dispatcher had admitted them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from sqlalchemy import insert, select

from celery_durable.message import CapturedMessage
from celery_durable.store.attempts import Attempt, Attempts, Ending
from celery_durable.store.clock import now_ms
from celery_durable.store.database import Database
from celery_durable.store.losses import Losses
from celery_durable.store.schema import ADMITTED, Tables, build_tables

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Rows:
    """A database with the tables of a client, and what tests look up in it."""

    database: Database
    tables: Tables

    @classmethod
    def create(cls, url: str) -> Rows:
        """Makes the tables."""
        database, tables = Database(url), build_tables()
        tables.metadata.create_all(database.engine)
        return cls(database, tables)

    @property
    def attempts(self) -> Attempts:
        """The statements under test."""
        return Attempts(self.database, self.tables)

    def lose(self, lost: Attempt, *, losses_max: int = 3) -> str:
        """The worker says that the attempt was lost."""

        def encode(text: str) -> Ending:
            return Ending("application/json", "utf-8", b"{}", error=text)

        return self.attempts.lose(lost, "its process died", Losses(self.tables, losses_max=losses_max, encode=encode))

    def admit(self, operation_id: str | None = None, *, policy: dict[str, Any] | None = None, **columns: Any) -> str:
        """Inserts an admitted operation and returns its ID."""
        operation_id = operation_id or f"op-{next(_numbers)}"
        row = {
            "id": operation_id,
            "task": "t",
            "queue": "celery",
            "state": ADMITTED,
            "enqueued_at": now_ms(),
            **columns,
        }
        payload = {"id": operation_id, "content_type": "application/json", "content_encoding": "utf-8", "body": b"[]"}
        payload |= {"digest": "d", "headers": {}, "properties": {}, "publish": {}, "policy": policy or {}}
        with self.database.transaction() as connection:
            connection.execute(insert(self.tables.operations).values(**row))
            connection.execute(insert(self.tables.payloads).values(**payload))
        return operation_id

    def row(self, operation_id: str) -> Any:
        """The operation's row."""
        operations = self.tables.operations
        with self.database.reading() as connection:
            return connection.execute(select(operations).where(operations.c.id == operation_id)).one()

    def payload(self, operation_id: str) -> Any:
        """The operation's payload."""
        payloads = self.tables.payloads
        with self.database.reading() as connection:
            return connection.execute(select(payloads).where(payloads.c.id == operation_id)).one()

    def history(self, operation_id: str) -> list[Any]:
        """The operation's ended attempts, oldest first."""
        attempts = self.tables.attempts
        statement = select(attempts).where(attempts.c.operation_id == operation_id).order_by(attempts.c.no)
        with self.database.reading() as connection:
            return list(connection.execute(statement))

    def wakes(self) -> list[str]:
        """The accounts that were woken."""
        with self.database.reading() as connection:
            return list(connection.scalars(select(self.tables.wakes.c.account).order_by(self.tables.wakes.c.no)))

    def now(self) -> int:
        """The database's time, in Unix ms."""
        with self.database.reading() as connection:
            return int(connection.execute(select(now_ms())).scalar_one())


def attempt(operation_id: str, number: int = 1, token: str = "token") -> Attempt:
    """An attempt of generation 1."""
    return Attempt(operation_id, 1, number, token)


def message(operation_id: str, **fields: Any) -> CapturedMessage:
    """A retry's message."""
    values: dict[str, Any] = {"id": operation_id, "task": "t", "body": b"new", "content_type": "application/json"}
    values |= {"content_encoding": "utf-8", "digest": "d2", "headers": {"a": 1}, "properties": {"p": 2}}
    values |= {"publish": {"q": 3}, "queue": "other", "eta_delay_ms": None, "expires_delay_ms": None}
    values |= {"priority": 4, "retries": 1, **fields}
    return CapturedMessage(**values)
