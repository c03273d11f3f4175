"""One look at everything that a dispatcher may have to do, in one statement: what makes an idle one cheap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, exists, or_, select

from celery_durable.store.schema import ADMITTED, RETRYING, RUNNING, SCHEDULED, WAITING_STATES, Tables
from celery_durable.store.sending import unsent
from celery_durable.store.sql import database_now, in_states


@dataclass(frozen=True, slots=True)
class Pending:
    """Which parts of a dispatcher have something to do. Someone else may be at it already."""

    passes: bool
    delivery: bool
    recovery: bool
    relay: bool


NOTHING = Pending(passes=False, delivery=False, recovery=False, relay=False)


class Watch:
    """The statement, built once per process."""

    def __init__(self, tables: Tables) -> None:
        self._look = _look(tables)

    def look(self, connection: Connection) -> Pending:
        """What is pending now, by the database's clock. It reads the first entries of a few indexes."""
        row = connection.execute(self._look).one()
        return Pending(bool(row.passes), bool(row.delivery), bool(row.recovery), bool(row.relay))


def _look(tables: Tables) -> Select[Any]:
    wakes, accounts, operations, outbox = tables.wakes, tables.accounts, tables.operations, tables.outbox

    def due(column: Any, *states: str) -> Any:
        conditions = [column.is_not(None), column <= database_now()]
        if states:
            conditions.append(in_states(operations, states))
        return exists().where(*conditions)

    return select(
        or_(exists(wakes.c.no), due(accounts.c.due_at)).label("passes"),
        # What was sent is due again seconds later: the delivery that looks then knows when.
        exists().where(unsent(operations), operations.c.due_at <= database_now()).label("delivery"),
        or_(
            due(operations.c.due_at, SCHEDULED, RETRYING),
            due(operations.c.alive_until, RUNNING),
            due(operations.c.expires_at, *WAITING_STATES, ADMITTED, RETRYING),
        ).label("recovery"),
        due(outbox.c.due_at).label("relay"),
    )
