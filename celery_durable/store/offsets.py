"""Offsets of consumed partitions, kept in SQL with what the messages did (rule 7).

A batch moves a partition's next offset by compare-and-set in the transaction of its effects, so of two consumers that
both believe they own the partition only one commits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, Column, Connection, Integer, MetaData, String, Table, select, update
from sqlalchemy.sql.dml import ReturningInsert, ReturningUpdate

from celery_durable.store.sql import dialect_of, insert_new


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
    if old is None:
        row = {
            "topic": new.topic,
            "partition": new.partition,
            "topic_id": new.topic_id,
            "next_offset": new.next_offset,
        }
        statement: ReturningInsert[Any] | ReturningUpdate[Any] = (
            insert_new(dialect_of(connection), offsets).values(row).returning(offsets.c.partition)
        )
    else:
        statement = (
            update(offsets)
            .where(
                offsets.c.topic == old.topic,
                offsets.c.partition == old.partition,
                offsets.c.topic_id == old.topic_id,
                offsets.c.next_offset == old.next_offset,
            )
            .values(topic_id=new.topic_id, next_offset=new.next_offset)
            .returning(offsets.c.partition)
        )
    if connection.execute(statement).first() is None:
        raise OffsetMoved(
            f"{new.topic} [{new.partition}]: the stored offset is no longer "
            f"{'absent' if old is None else old.next_offset}: another consumer moved it"
        )
