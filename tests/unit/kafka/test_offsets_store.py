"""Offsets under compare-and-set, on SQLite and PostgreSQL."""

from __future__ import annotations

from dataclasses import replace
from threading import Event, Thread

import pytest
from sqlalchemy import MetaData, Table

from celery_durable.store import offsets
from celery_durable.store.database import Database
from celery_durable.store.offsets import OffsetMoved, Position, offsets_table

FIRST = Position("accounts", 3, "topic-1", 10)


@pytest.fixture
def table(database: Database) -> Table:
    metadata = MetaData()
    table = offsets_table(metadata, "test_")
    metadata.create_all(database.engine)
    return table


def move(database: Database, table: Table, old: Position | None, new: Position) -> None:
    with database.transaction() as connection:
        offsets.advance(connection, table, old, new)


def test_moves_only_from_where_it_is(database: Database, table: Table) -> None:
    """Rule 7."""
    move(database, table, None, FIRST)
    second = replace(FIRST, next_offset=20)
    move(database, table, FIRST, second)
    for stale in (None, FIRST, replace(second, topic_id="topic-2")):
        with pytest.raises(OffsetMoved, match=r"accounts \[3\]"):
            move(database, table, stale, replace(FIRST, next_offset=30))
    with database.reading() as connection:
        assert offsets.load(connection, table, "accounts") == {3: second}
        assert offsets.load(connection, table, "other") == {}


def test_a_recreated_topic_moves_back(database: Database, table: Table) -> None:
    """B8."""
    move(database, table, None, FIRST)
    again = Position("accounts", 3, "topic-2", 1)
    move(database, table, FIRST, again)
    with database.reading() as connection:
        assert offsets.load(connection, table, "accounts") == {3: again}


def test_of_two_owners_one_commits(database: Database, table: Table) -> None:
    """A17, B9: the second waits for the first's transaction and finds that the offset moved."""
    move(database, table, None, FIRST)
    began, outcome = Event(), []

    def second() -> None:
        began.set()
        try:
            move(database, table, FIRST, replace(FIRST, next_offset=12))
        except OffsetMoved:
            outcome.append("moved")

    with database.transaction() as connection:
        offsets.advance(connection, table, FIRST, replace(FIRST, next_offset=11))
        thread = Thread(target=second)
        thread.start()
        assert began.wait(5)
    thread.join(15)
    assert outcome == ["moved"]


def test_some_partitions_together(database: Database, table: Table) -> None:
    """Those that another consumer moved are named, whichever they are; nothing is kept of the rest by the caller."""

    def at(number: int, next_offset: int, topic_id: str = "topic-1") -> Position:
        return Position("accounts", number, topic_id, next_offset)

    def move_all(*moves: tuple[Position | None, Position]) -> None:
        with database.transaction() as connection:
            offsets.advance_all(connection, table, moves)

    move_all(*[(None, at(number, 1)) for number in range(4)])
    move_all((at(3, 1), at(3, 5)), (at(1, 1), at(1, 6, "topic-2")), (None, at(4, 7)), (at(0, 1), at(0, 8)))
    with pytest.raises(OffsetMoved) as failure:
        move_all(
            (at(0, 8), at(0, 9)),
            (at(1, 6), at(1, 9)),
            (at(2, 2), at(2, 9)),
            (None, at(4, 9)),
            (None, at(5, 9)),
            (at(6, 1), at(6, 9)),
        )
    assert failure.value.partitions == {1, 2, 4, 6}
    with database.reading() as connection:
        found = offsets.load(connection, table, "accounts")
    assert {number: (position.topic_id, position.next_offset) for number, position in found.items()} == {
        0: ("topic-1", 8),
        1: ("topic-2", 6),
        2: ("topic-1", 1),
        3: ("topic-1", 5),
        4: ("topic-1", 7),
    }
