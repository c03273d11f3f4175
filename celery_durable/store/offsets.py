"""Offsets of consumed partitions, kept in SQL with what the messages did (rule 7).

A batch moves a partition's next offset by compare-and-set in the transaction of its effects, so of two consumers that
both believe they own the partition only one commits.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import BigInteger, Column, Connection, Integer, MetaData, String, Table


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
    raise NotImplementedError


def advance(connection: Connection, offsets: Table, old: Position | None, new: Position) -> None:
    """Moves the partition from ``old`` (None: no row yet) to ``new``. Raises :class:`OffsetMoved` if it is not there."""
    raise NotImplementedError
