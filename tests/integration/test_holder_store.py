"""The holder's statements, on both databases: every write is a compare-and-set."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Connection

from celery_durable.permits.messages import Command, LimitMirror, Pause, SetLimit
from celery_durable.store import counters
from celery_durable.store.database import Database
from celery_durable.store.migrate import migrate
from celery_durable.store.sql import PARAMETERS_MAX
from holder_service import life, semaphore, store
from holder_service.inbox import Letters
from holder_service.ledger import Ledger
from holder_service.life import LifeChanged, Rebuild
from holder_service.migrations import HOLDER
from holder_service.settings import load
from holder_service.store import HolderTables, Row, VersionMoved, Write

EPOCH = 1_000


@pytest.fixture
def tables() -> HolderTables:
    return store.build_tables()


@pytest.fixture
def database(database_url: str, tables: HolderTables) -> Iterator[Database]:
    database = Database(database_url)
    migrate(database, tables, migrations=HOLDER)
    yield database
    database.dispose()


def row(account: str, *, version: int = 1, partition: int = 0, due_at_ms: int | None = None) -> Row:
    return Row(account, partition, version, due_at_ms, semaphore.new_account(account, EPOCH))


def insert(database: Database, tables: HolderTables, *rows: Row) -> None:
    with database.transaction() as connection:
        store.write_rows(connection, tables, [Write(each.account, None, each) for each in rows])


def names(database: Database, tables: HolderTables, *accounts: str) -> set[str]:
    with database.reading() as connection:
        return set(store.load_rows(connection, tables, accounts))


def test_a_write_succeeds_only_at_the_version_that_was_read(database: Database, tables: HolderTables) -> None:
    """Rule 7: inserts and deletes included; one lost account takes the whole transaction back."""
    insert(database, tables, row("a", version=5), row("b", version=6))
    stale = [
        [Write("a", 5, row("a", version=7)), Write("b", 5, row("b", version=8))],
        [Write("a", 5, None), Write("b", 4, None)],
        [Write("c", None, row("c", version=9)), Write("a", None, row("a", version=10))],
    ]
    for writes in stale:
        with pytest.raises(VersionMoved), database.transaction() as connection:
            store.write_rows(connection, tables, writes)
    with database.reading() as connection:
        found = store.load_rows(connection, tables, ["a", "b", "c"])
    assert {name: each.version for name, each in found.items()} == {"a": 5, "b": 6}
    with database.transaction() as connection:
        writes = [Write("a", 5, None), Write("b", 6, row("b", version=11, partition=3, due_at_ms=77))]
        store.write_rows(connection, tables, [*writes, Write("c", None, row("c", version=12))])
    with database.reading() as connection:
        found = store.load_rows(connection, tables, ["a", "b", "c"])
    assert set(found) == {"b", "c"}
    assert (found["b"].version, found["b"].partition, found["b"].due_at_ms) == (11, 3, 77)
    assert found["b"].state == semaphore.new_account("b", EPOCH)


def test_more_accounts_than_a_statement_has_parameters(database: Database, tables: HolderTables) -> None:
    """They are asked for in several statements."""
    insert(database, tables, row("a"), row("z"))
    assert names(database, tables, "a", "z", *(f"m{n}" for n in range(3 * PARAMETERS_MAX))) == {"a", "z"}


@pytest.mark.parametrize("account", ["1", "1:2", "ÄÖ\u200b😀", 'it\'s "quoted" %s :name', "  ", "x" * 1_024, "A", "a"])
def test_accounts_of_every_shape(database: Database, tables: HolderTables, account: str) -> None:
    """Case E5: upper and lower case are two accounts."""
    insert(database, tables, row(account))
    assert names(database, tables, account, account.swapcase() + "x") == {account}


def test_the_rows_of_all_accounts_come_in_batches(database: Database, tables: HolderTables) -> None:
    insert(database, tables, *(row(f"a{n:03}") for n in range(25)))
    with database.reading() as connection:
        batches = [sorted(each.account for each in batch) for batch in store.all_rows(connection, tables, batch=10)]
    assert [len(batch) for batch in batches] == [10, 10, 5]
    assert [name for batch in batches for name in batch] == [f"a{n:03}" for n in range(25)]


def test_timers_of_owned_partitions_come_longest_due_first(database: Database, tables: HolderTables) -> None:
    insert(
        database,
        tables,
        row("late", due_at_ms=50),
        row("later", partition=2, due_at_ms=60),
        row("future", due_at_ms=200),
        row("others", partition=1, due_at_ms=10),
        row("none"),
    )
    with database.reading() as connection:
        assert store.due_accounts(connection, tables, {0, 2}, 100, limit=10) == [("late", 0), ("later", 2)]
        assert store.next_due_ms(connection, tables, {0, 2}) == 50
        assert store.next_due_ms(connection, tables, {7}) is None


def test_accounts_of_partitions_that_are_gone_are_adopted(database: Database, tables: HolderTables) -> None:
    """A topic made anew with fewer partitions (case B8): somebody must still run their timers."""
    insert(database, tables, row("kept", partition=1), row("orphan", partition=9))
    with database.transaction() as connection:
        assert store.adopt_partitions(connection, tables, 4) == 1
    with database.reading() as connection:
        found = store.load_rows(connection, tables, ["kept", "orphan"])
    assert {name: each.partition for name, each in found.items()} == {"kept": 1, "orphan": 1}


def test_commands_outlive_the_account_and_the_newest_wins(database: Database, tables: HolderTables) -> None:
    old, new = LimitMirror(account="a", limit=3), LimitMirror(account="a", limit=4, paused=True, seqs={"x": 2})
    for mirror in (old, new):
        with database.transaction() as connection:
            store.write_mirrors(connection, tables, [mirror, LimitMirror(account="b")])
    with database.reading() as connection:
        assert store.load_mirrors(connection, tables, ["a", "c"]) == {"a": new}


def test_of_instances_that_start_at_once_one_begins_the_life(database: Database, tables: HolderTables) -> None:
    """Design, section 8: the first start is decided once."""
    outcomes: list[str] = []
    barrier = threading.Barrier(4)

    def start() -> None:
        barrier.wait()
        try:
            with database.transaction() as connection:
                life.begin(connection, tables, "ready")
            outcomes.append("began")
        except LifeChanged:
            outcomes.append("too late")

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["began", "too late", "too late", "too late"]


def test_a_life_changes_only_from_the_revision_that_was_read(database: Database, tables: HolderTables) -> None:
    with database.transaction() as connection:
        begun = life.begin(connection, tables, "ready")
    with database.transaction() as connection:
        rebuilding = life.change(
            connection, tables, begun, phase="rebuilding", epoch=begun.epoch + 1, rebuild=Rebuild(rebuilder="me")
        )
    with pytest.raises(LifeChanged), database.transaction() as connection:
        life.change(connection, tables, begun, phase="ready")
    with database.reading() as connection:
        found = life.load(connection, tables)
    assert found == rebuilding
    assert found is not None
    assert 0 <= found.silent_ms < 60_000
    with database.transaction() as connection:
        lower = life.change(connection, tables, found, phase="ready", epoch=5)
    assert (lower.epoch, lower.rebuild) == (rebuilding.epoch, None), "an epoch never goes back"


def test_no_transaction_of_an_old_life_commits_after_the_new_one(database: Database, tables: HolderTables) -> None:
    """Whoever changes the life takes the version counter's lock, which every holder's transaction takes first."""
    with database.transaction() as connection:
        begun = life.begin(connection, tables, "ready")
    changed = threading.Event()

    def change() -> None:
        with database.transaction() as connection:
            life.change(connection, tables, begun, phase="rebuilding")
        changed.set()

    with database.transaction() as connection:
        counters.draw(connection, tables.counters, store.VERSION_COUNTER)
        thread = threading.Thread(target=change)
        thread.start()
        assert not changed.wait(0.3), "the change must wait for the transaction that drew before it"
        current = life.load(connection, tables)
        assert current is not None
        assert current.revision == begun.revision
    thread.join(10)
    assert changed.is_set()


@pytest.mark.postgresql
def test_two_owners_of_an_account_without_a_row_lose_no_command(postgresql_url: str, tables: HolderTables) -> None:
    """Case A37: while the number of partitions changes, commands of one account come to two owners at once."""
    database = Database(postgresql_url)
    migrate(database, tables, migrations=HOLDER)
    settings = load(database_url=postgresql_url)
    with database.transaction() as connection:
        begun = life.begin(connection, tables, "ready")

    def apply(connection: Connection, partition: int, command: Command) -> None:
        work = {"acme": Letters(partition, [command])}
        Ledger(tables, settings, settings.semaphore()).apply(connection, begun, work)

    def second() -> None:
        with database.transaction() as connection:
            begins.set()
            apply(connection, 1, Pause(client_id="b", account="acme", seq=1))

    begins = threading.Event()
    with ThreadPoolExecutor() as pool:
        with database.transaction() as connection:
            apply(connection, 0, SetLimit(client_id="a", account="acme", seq=1, limit=7))
            late = pool.submit(second)
            assert begins.wait(10)
            with pytest.raises(TimeoutError):
                late.result(0.5)
        late.result(10)
    with database.reading() as connection:
        mirror = store.load_mirrors(connection, tables, ["acme"])["acme"]
    assert (mirror.limit, mirror.paused) == (7, True)
    database.dispose()
