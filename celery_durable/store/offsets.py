"""Offsets of consumed partitions, kept in SQL with what the messages did (rule 7).

A batch moves a partition's next offset by compare-and-set in the transaction of its effects, so of two consumers that
both believe they own the partition only one commits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import BigInteger, Column, Connection, Integer, MetaData, String, Table, bindparam, select, update

from celery_durable.store.arrays import from_rows, parameters
from celery_durable.store.prepared import PSYCOPG
from celery_durable.store.sql import Dialect, dialect_of, insert_new, is_psycopg


def offsets_table(metadata: MetaData, prefix: str) -> Table:
    """The offsets under ``prefix``."""
    return Table(
        f"{prefix}offsets",
        metadata,
        Column("topic", String(255), primary_key=True),
        Column("partition", Integer, primary_key=True),
        Column(
            "topic_id",
            String(64),
            nullable=False,
            comment="Kafka's ID of the topic: another one is a new topic",
        ),
        Column("next_offset", BigInteger, nullable=False),
        comment="The next offset to read of each partition",
    )


@dataclass(frozen=True, slots=True)
class Position:
    """Where a partition is to be read next."""

    topic: str
    partition: int
    topic_id: str
    next_offset: int


class OffsetMoved(Exception):
    """Another consumer moved the offset of ``partitions``: this one is no longer their owner, and must drop them."""

    def __init__(self, topic: str, partitions: Collection[int]) -> None:
        super().__init__(f"{topic} {sorted(partitions)}: the stored offset was moved by another consumer")
        self.partitions = frozenset(partitions)


def load(connection: Connection, offsets: Table, topic: str) -> dict[int, Position]:
    """The stored positions of the topic's partitions."""
    rows = connection.execute(_load(offsets), {"of_topic": topic})
    return {row.partition: Position(*row) for row in rows}


@lru_cache(maxsize=64)
def _load(offsets: Table) -> Any:
    columns = (offsets.c.topic, offsets.c.partition, offsets.c.topic_id, offsets.c.next_offset)
    return select(*columns).where(offsets.c.topic == bindparam("of_topic"))


def advance(connection: Connection, offsets: Table, old: Position | None, new: Position) -> None:
    """Moves the partition from ``old`` (None: no row yet) to ``new``. Raises :class:`OffsetMoved` if it is not there.

    The row stays locked until the transaction ends: a second owner waits, then finds that it moved.
    """
    statement = _first(offsets, dialect_of(connection)) if old is None else _move(offsets)
    if connection.execute(statement, _values(old, new)).first() is None:
        raise OffsetMoved(new.topic, {new.partition})


def advance_all(connection: Connection, offsets: Table, moves: Sequence[tuple[Position | None, Position]]) -> None:
    """As :func:`advance`, for some partitions of one topic, on PostgreSQL in one statement.

    Raises :class:`OffsetMoved` with the partitions that were not where they should be.
    """
    singly, astray = list(moves), set()
    known = sorted((_values(old, new) for old, new in moves if old is not None), key=lambda row: row["number"])
    if len(known) > 1 and is_psycopg(connection):
        found = connection.exec_driver_sql(_move_many(offsets), parameters(_MOVED, known)).scalars()
        astray.update({row["number"] for row in known}.difference(found))
        singly = [move for move in moves if move[0] is None]
    for old, new in singly:
        try:
            advance(connection, offsets, old, new)
        except OffsetMoved as moved:
            astray.update(moved.partitions)
    if astray:
        raise OffsetMoved(moves[0][1].topic, astray)


def _values(old: Position | None, new: Position) -> dict[str, Any]:
    values = {"of_topic": new.topic, "number": new.partition}
    if old is not None:
        values |= {"old_topic_id": old.topic_id, "old_offset": old.next_offset}
    return values | {"new_topic_id": new.topic_id, "new_offset": new.next_offset}


_MOVED = {
    "number": "integer",
    **dict.fromkeys(("of_topic", "old_topic_id", "new_topic_id"), "text"),
    **dict.fromkeys(("old_offset", "new_offset"), "bigint"),
}


@lru_cache(maxsize=64)
def _move_many(offsets: Table) -> str:
    return f"""
        UPDATE {PSYCOPG.identifier_preparer.format_table(offsets)} AS present
        SET topic_id = new.new_topic_id, next_offset = new.new_offset FROM {from_rows(_MOVED)}
        WHERE present.topic = new.of_topic AND present.partition = new.number
            AND present.topic_id = new.old_topic_id AND present.next_offset = new.old_offset
        RETURNING present.partition
        """


@lru_cache(maxsize=64)
def _first(offsets: Table, dialect: Dialect) -> Any:
    values: dict[str, Any] = {
        "topic": bindparam("of_topic"),
        "partition": bindparam("number"),
        "topic_id": bindparam("new_topic_id"),
        "next_offset": bindparam("new_offset"),
    }
    return insert_new(dialect, offsets).values(values).returning(offsets.c.partition)


@lru_cache(maxsize=64)
def _move(offsets: Table) -> Any:
    return (
        update(offsets)
        .where(
            offsets.c.topic == bindparam("of_topic"),
            offsets.c.partition == bindparam("number"),
            offsets.c.topic_id == bindparam("old_topic_id"),
            offsets.c.next_offset == bindparam("old_offset"),
        )
        .values(topic_id=bindparam("new_topic_id"), next_offset=bindparam("new_offset"))
        .returning(offsets.c.partition)
    )
