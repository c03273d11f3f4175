"""The outbox's statements, on SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import MetaData, Table, select, text, update

from celery_durable.store import outbox
from celery_durable.store.clock import now_ms
from celery_durable.store.database import Database
from celery_durable.store.outbox import Outgoing, Staged, outbox_table

HOLD_MS = 60_000


@pytest.fixture
def table(database: Database) -> Table:
    metadata = MetaData()
    table = outbox_table(metadata, "test_")
    metadata.create_all(database.engine)
    return table


@pytest.fixture
def concurrent(postgresql_url: str) -> Iterator[tuple[Database, Table]]:
    """Where two transactions write at once, which SQLite does not have."""
    database, metadata = Database(postgresql_url), MetaData()
    table = outbox_table(metadata, "test_")
    metadata.create_all(database.engine)
    yield database, table
    database.dispose()


def report(key: str, body: bytes = b"1") -> Staged:
    return Staged("accounts", key, body, slot="report")


def stage(database: Database, table: Table, *messages: Staged) -> None:
    with database.transaction() as connection:
        outbox.stage(connection, table, messages)


def claim(database: Database, table: Table, limit: int = 100) -> list[Outgoing]:
    with database.transaction() as connection:
        return outbox.claim(connection, table, limit=limit, hold_ms=HOLD_MS)


def bodies(database: Database, table: Table) -> list[bytes]:
    with database.reading() as connection:
        return sorted(connection.execute(select(table.c.body)).scalars())


def test_a_rollback_sends_nothing(database: Database, table: Table) -> None:
    """B1: report and state change commit together."""

    class Rollback(Exception):
        pass

    def fail() -> None:
        with database.transaction() as connection:
            outbox.stage(connection, table, [report("a")])
            raise Rollback

    with pytest.raises(Rollback):
        fail()
    assert bodies(database, table) == []


def test_a_slot_keeps_the_newest_only(database: Database, table: Table) -> None:
    stage(database, table, report("a", b"1"), report("b", b"1"), report("a", b"2"))
    stage(database, table, report("a", b"3"), Staged("events", "a", b"e1"), Staged("events", "a", b"e2"))
    assert bodies(database, table) == [b"1", b"3", b"e1", b"e2"]


def test_headers_and_keys_of_every_shape_survive(database: Database, table: Table) -> None:
    """E5: unicode, quotes, spaces."""
    keys = ["1", "1:2", "x" * 1024, "naïve ☃ 漢", 'o\'brien "q" %s', " ", "A", "a", ""]
    stage(database, table, *(Staged("t", key, b"", slot="report", headers={"reason": key}) for key in keys))
    claimed = claim(database, table)
    assert {row.key for row in claimed} == set(keys)
    assert all(row.headers == {"reason": row.key} for row in claimed)


def test_a_newer_row_survives_the_acknowledgement_of_the_older(database: Database, table: Table) -> None:
    """B3."""
    stage(database, table, report("a", b"old"))
    sent = claim(database, table)
    stage(database, table, report("a", b"new"))
    with database.transaction() as connection:
        assert outbox.delivered(connection, table, sent) == 0
        outbox.failed(connection, table, sent, retry_min_ms=60_000, retry_max_ms=60_000)
    (newer,) = claim(database, table)
    assert (newer.body, newer.no, newer.version, newer.failures) == (b"new", sent[0].no, sent[0].version + 1, 0)
    with database.transaction() as connection:
        assert outbox.delivered(connection, table, [newer]) == 1
    assert bodies(database, table) == []


def test_a_number_is_never_given_twice(database: Database, table: Table) -> None:
    """B3: a late acknowledgement of a deleted row must not delete the row that came after it."""
    stage(database, table, report("a", b"first"))
    sent = claim(database, table)
    with database.transaction() as connection:
        outbox.delivered(connection, table, sent)
    stage(database, table, report("b", b"second"))
    with database.transaction() as connection:
        assert outbox.delivered(connection, table, sent) == 0
    assert bodies(database, table) == [b"second"]


def test_a_claimed_row_is_held_and_due_again_after_the_hold(database: Database, table: Table) -> None:
    stage(database, table, report("a"))
    with database.transaction() as connection:
        assert len(outbox.claim(connection, table, limit=10, hold_ms=HOLD_MS)) == 1
        assert outbox.claim(connection, table, limit=10, hold_ms=HOLD_MS) == []
        due_ms = outbox.due_in_ms(connection, table)
        assert due_ms is not None
        assert HOLD_MS - 10_000 < due_ms <= HOLD_MS
        connection.execute(update(table).values(due_at=now_ms() - 1))
        assert len(outbox.claim(connection, table, limit=10, hold_ms=HOLD_MS)) == 1


def test_a_failure_holds_back_its_own_row_and_backs_off(database: Database, table: Table) -> None:
    """B6."""
    stage(database, table, report("a"), report("b"))
    rows = {row.key: row for row in claim(database, table)}
    waits = []
    for _ in range(4):
        with database.transaction() as connection:
            outbox.failed(connection, table, [rows["a"]], retry_min_ms=10_000, retry_max_ms=40_000)
            due = connection.execute(select(table.c.due_at - now_ms()).where(table.c.key == "a")).scalar_one()
            waits.append(round(due / 10_000))
            connection.execute(update(table).where(table.c.key == "a").values(due_at=0))
        (rows["a"],) = claim(database, table)
    assert waits == [1, 2, 4, 4]
    with database.transaction() as connection:
        assert outbox.delivered(connection, table, [rows["b"]]) == 1


@pytest.mark.postgresql
def test_a_row_committed_late_is_seen(concurrent: tuple[Database, Table]) -> None:
    """B12: the neighbour with the higher number was claimed and deleted before."""
    database, table = concurrent
    with database.transaction() as early:
        outbox.stage(early, table, [report("early")])
        stage(database, table, report("late"))
        sent = claim(database, table)
        assert [row.key for row in sent] == ["late"]
        with database.transaction() as connection:
            outbox.delivered(connection, table, sent)
    assert [row.key for row in claim(database, table)] == ["early"]


@pytest.mark.postgresql
def test_a_row_that_is_being_replaced_is_neither_waited_for_nor_deleted(concurrent: tuple[Database, Table]) -> None:
    """A relay never waits for a pass, and cannot deadlock with one."""
    database, table = concurrent
    stage(database, table, report("a", b"1"), report("b", b"1"))
    sent = claim(database, table)
    with database.transaction() as replacing:
        outbox.stage(replacing, table, [report("a", b"2")])
        with database.transaction() as connection:
            assert outbox.delivered(connection, table, sent) == 1
    assert bodies(database, table) == [b"2"]


def test_many_rows_at_once(database: Database, table: Table) -> None:
    """No statement meets a limit of parameters."""
    stage(database, table, *(report(f"k{number}") for number in range(5_000)))
    sent = claim(database, table, limit=5_000)
    assert len(sent) == 5_000
    with database.transaction() as connection:
        outbox.failed(connection, table, sent[:1_500], retry_min_ms=1, retry_max_ms=1)
        assert outbox.delivered(connection, table, sent) == 5_000
        assert outbox.depth(connection, table) == (0, 0)
        assert outbox.due_in_ms(connection, table) is None


def test_depth_counts_the_age_from_the_first_staging(database: Database, table: Table) -> None:
    stage(database, table, report("a"), report("b"))
    with database.transaction() as connection:
        connection.execute(update(table).where(table.c.key == "a").values(staged_at=table.c.staged_at - 5_000))
    stage(database, table, report("a", b"2"))
    with database.reading() as connection:
        rows, age_ms = outbox.depth(connection, table)
    assert rows == 2
    assert 5_000 <= age_ms < 15_000


@pytest.mark.postgresql
def test_the_due_search_uses_the_index(concurrent: tuple[Database, Table]) -> None:
    """A28: the relay's poll costs the same with any number of rows that are not due."""
    database, table = concurrent
    with database.transaction() as connection:
        outbox.stage(connection, table, [Staged("t", f"k{number}", b"", slot="s") for number in range(3_000)])
        connection.execute(update(table).values(due_at=now_ms() + 3_600_000))
        connection.exec_driver_sql(f"ANALYZE {table.name}")
        plan = connection.exec_driver_sql(
            f"EXPLAIN SELECT no FROM {table.name} WHERE due_at <= "
            "(SELECT (extract(epoch from clock_timestamp()) * 1000)::bigint) ORDER BY due_at, no LIMIT 100"
        ).scalars()
        assert "Index Scan" in "\n".join(plan)


def test_what_a_relay_writes_waits_for_no_disk(concurrent: tuple[Database, Table]) -> None:
    """A crash of the server that takes it back has the message sent again. What is staged does wait."""
    database, table = concurrent
    setting = text("SHOW synchronous_commit")
    with database.transaction() as connection:
        outbox.stage(connection, table, [report("a")])
        assert connection.scalar(setting) == "on"
    with database.transaction() as connection:
        claimed = outbox.claim(connection, table, limit=1, hold_ms=HOLD_MS)
        assert connection.scalar(setting) == "off"
    with database.transaction() as connection:
        assert outbox.delivered(connection, table, claimed) == 1
        assert connection.scalar(setting) == "off"
    with database.transaction() as connection:
        assert connection.scalar(setting) == "on", "of no other transaction"


@pytest.mark.parametrize("order", [1, -1])
def test_a_row_that_was_replaced_while_it_was_sent_is_told_at_its_newest_version(
    database: Database, table: Table, order: int
) -> None:
    """Both its versions may be reported at once: the newest one was sent, or was not."""
    for key in ("one", "other"):
        stage(database, table, report(key))
    older = claim(database, table)
    stage(database, table, report("one", b"2"))
    newer = claim(database, table)
    assert [row.version for row in newer] == [2]
    both = [*older, *newer][::order]
    with database.transaction() as connection:
        outbox.failed(connection, table, both, retry_min_ms=1, retry_max_ms=1)
    with database.reading() as connection:
        assert connection.execute(select(table.c.failures)).scalars().all() == [1, 1]
    with database.transaction() as connection:
        assert outbox.delivered(connection, table, both) == 2
    assert bodies(database, table) == []
