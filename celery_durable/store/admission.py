"""Admits queued operations: of each group the first by priority and order, skipping rows that others hold.

A row that a user's transaction holds (a cancel not yet committed) is left out and the next one admitted in its place,
so it stalls nobody (case A36).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ARRAY,
    Column,
    Connection,
    Integer,
    Select,
    Text,
    Update,
    any_,
    bindparam,
    cast,
    column,
    func,
    select,
    true,
    update,
)

from celery_durable.store.clock import now_ms
from celery_durable.store.schema import ADMITTED, QUEUED, Tables
from celery_durable.store.sending import Resends
from celery_durable.store.sql import Dialect, among, in_states, parts


@dataclass(frozen=True, slots=True)
class Admitted:
    """An attempt that may be sent to Celery now: its row says already when to send it again."""

    order_no: int
    id: str
    generation: int
    attempt: int
    queue: str


class Admission:
    """The statements, built once per process. They work inside the transaction that holds the accounts' locks."""

    def __init__(self, tables: Tables, dialect: Dialect, resends: Resends) -> None:
        self._dialect: Dialect = dialect
        self._first = _first(tables)
        self._admit = _admit(tables, resends).where(among(tables.operations.c.order_no, "numbers", dialect))
        self._admit_first = _admit_first(tables, resends)

    def admit(
        self, connection: Connection, wanted: Mapping[tuple[str, str], int]
    ) -> dict[tuple[str, str], list[Admitted]]:
        """Admits at most ``wanted[account, group]`` operations of each group. Returns those of each that were.

        Fewer come back where fewer wait, or where others hold rows.
        """
        wanted = {key: count for key, count in wanted.items() if count > 0}
        if not wanted:
            return {}
        admitted: dict[tuple[str, str], list[Admitted]] = {}
        for row in self._admitted(connection, wanted):
            one = Admitted(row.order_no, row.id, row.generation, row.attempt, row.queue)
            admitted.setdefault((row.account, row.group), []).append(one)
        return admitted

    def _admitted(self, connection: Connection, wanted: Mapping[tuple[str, str], int]) -> Sequence[Any]:
        if self._dialect == "postgresql":
            parameters: dict[str, Any] = {
                "accounts": [account for account, _ in wanted],
                "groups": [group for _, group in wanted],
                "counts": list(wanted.values()),
            }
            rows = connection.execute(self._admit_first, parameters).all()
            # RETURNING keeps no order.
            return sorted(rows, key=lambda row: (-row.priority, row.order_no))
        rows = [
            row
            for (account, group), count in wanted.items()
            for row in connection.execute(self._first, {"account": account, "group": group, "count": count})
        ]
        for some in parts(sorted(row.order_no for row in rows)):
            connection.execute(self._admit, {"numbers": some})
        return rows


def _picked(tables: Tables) -> list[Column[Any]]:
    names = ("order_no", "id", "generation", "attempt", "queue", "account", "group", "priority")
    return [tables.operations.c[name] for name in names]


def _queued(tables: Tables, account: Any, group: Any) -> Select[Any]:
    operations = tables.operations
    return (
        select(*_picked(tables))
        .where(operations.c.account == account, operations.c.group == group, in_states(operations, (QUEUED,)))
        .order_by(operations.c.priority.desc(), operations.c.order_no)
        .with_for_update(skip_locked=True)
    )


def _first(tables: Tables) -> Select[Any]:
    return _queued(tables, bindparam("account"), bindparam("group")).limit(bindparam("count"))


def _admit_first(tables: Tables, resends: Resends) -> Any:
    """All of it in one statement, for many groups at once."""
    names = func.unnest(
        cast(bindparam("accounts"), ARRAY(Text)),
        cast(bindparam("groups"), ARRAY(Text)),
        cast(bindparam("counts"), ARRAY(Integer)),
    )
    wanted = names.table_valued(
        column("account", Text), column("group", Text), column("count", Integer)
    ).render_derived("wanted")
    picked = _queued(tables, wanted.c.account, wanted.c.group).limit(wanted.c.count).lateral("picked")
    first = select(picked.c.order_no).select_from(wanted.join(picked, true())).cte("first")
    operations = tables.operations
    # As an array: of a join PostgreSQL would believe that it is long, and read the whole table for it.
    numbers = func.array(select(first.c.order_no).scalar_subquery())
    admit = _admit(tables, resends).where(operations.c.order_no == any_(numbers))
    return admit.returning(*_picked(tables))


def _admit(tables: Tables, resends: Resends) -> Update:
    operations = tables.operations
    return update(operations).values(
        state=ADMITTED,
        admitted_at=now_ms(),
        due_at=now_ms() + resends.delay_ms(operations.c.sends),
        sends=operations.c.sends + 1,
    )
