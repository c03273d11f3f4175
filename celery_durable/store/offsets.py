"""Offsets of consumed partitions, kept in SQL with what the messages did (rule 7).

A batch moves a partition's next offset by compare-and-set in the transaction of its effects, so of two consumers that
both believe they own the partition only one commits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import BigInteger, Column, Connection, Integer, MetaData, String, Table, bindparam, select, update

from celery_durable.store.sql import Dialect, dialect_of, insert_new


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
    """Another consumer moved this partition's offset: this one is no longer its owner, and must drop it."""


def load(connection: Connection, offsets: Table, topic: str) -> dict[int, Position]:
    """The stored positions of the topic's partitions."""
    columns = (offsets.c.topic, offsets.c.partition, offsets.c.topic_id, offsets.c.next_offset)
    rows = connection.execute(select(*columns).where(offsets.c.topic == topic))
    return {row.partition: Position(*row) for row in rows}


def advance(connection: Connection, offsets: Table, old: Position | None, new: Position) -> None:
    """Moves the partition from ``old`` (None: no row yet) to ``new``. Raises :class:`OffsetMoved` if it is not there.

    The row stays locked until the transaction ends: a second owner waits, then finds that it moved.
    """
    row: dict[str, Any] = {"new_topic_id": new.topic_id, "new_offset": new.next_offset}
    if old is None:
        row |= {"of_topic": new.topic, "number": new.partition}
        statement = _first(offsets, dialect_of(connection))
    else:
        row |= {
            "of_topic": old.topic,
            "number": old.partition,
            "old_topic_id": old.topic_id,
            "old_offset": old.next_offset,
        }
        statement = _move(offsets)
    if connection.execute(statement, row).first() is None:
        raise OffsetMoved(
            f"{new.topic} [{new.partition}]: the stored offset is no longer "
            f"{'absent' if old is None else old.next_offset}: another consumer moved it"
        )


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
