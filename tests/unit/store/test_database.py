"""What a database's URL may be, and that no message shows its passwords."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from celery import Celery

from celery_durable import DurableTask
from celery_durable.errors import ConfigurationError
from celery_durable.runtime import runtime_of
from celery_durable.store.database import Database, redact
from celery_durable.store.migrate import check, migrate
from celery_durable.store.schema import build_tables
from tests.harness import wait_until


def _a_folder(path: Path) -> None:
    path.mkdir()


def _no_database(path: Path) -> None:
    path.write_text("no database " * 100)


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda _path: None, "there is no folder {folder}: make it, or correct the path"),
        (lambda path: (path.parent.mkdir(), _a_folder(path)), "{path} is a folder: name a file in it"),
        (lambda path: (path.parent.mkdir(), _no_database(path)), "{path} is no SQLite database: move it away"),
    ],
)
def test_a_file_that_sqlite_cannot_open_is_told_with_its_remedy(
    tmp_path: Path, prepare: Callable[[Path], object], says: str
) -> None:
    """By ``delay()``, a result, a cancel, and by what every command and process asks first."""
    path = tmp_path / "there" / "shop.sqlite3"
    prepare(path)
    app = Celery("shop", set_as_current=False)
    app.conf.durable = {"client_id": "shop", "database_url": f"sqlite:///{path}"}

    @app.task(base=DurableTask, shared=False, name="t")
    def task() -> None:
        """Never runs."""

    runtime = runtime_of(app)
    for act in (
        task.delay,
        task.AsyncResult("one").cancel,
        lambda: task.AsyncResult("one").state,
        lambda: check(runtime.database, runtime.tables),
        lambda: migrate(runtime.database, runtime.tables),
    ):
        with pytest.raises(ConfigurationError) as caught:
            act()
        expected = says.format(folder=path.parent, path=path)
        assert str(caught.value).startswith(f"database_url = sqlite:///{path}: {expected}")
    runtime.database.dispose()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("hunter2", "database_url = (not a database URL)"),
        ("postgresql://me:hunter2@host:port/db", "database_url = (not a database URL)"),
        ("sqlite:///hunter2\0", "it holds a NUL"),
        ("mysql://me:hunter2@host/db", "mysql is not supported"),
        ("postgresql+psycopg2://me:hunter2@host/db", "the driver postgresql+psycopg2 is not supported"),
        ("postgresql+asyncpg://host/db?password=hunter2", "the driver postgresql+asyncpg is not supported"),
        ("sqlite+aiosqlite:///x.sqlite3", "the driver sqlite+aiosqlite is not supported"),
        ("sqlite://", "a database in memory is lost with its connection; name a file"),
        ("sqlite:///", "a database in memory is lost"),
        ("sqlite:///:memory:", "a database in memory is lost"),
    ],
)
def test_urls_that_cannot_be_used_are_refused_in_one_line(url: str, says: str) -> None:
    """G5 (of a wrong URL): it is told by the name of its setting, without its password."""
    with pytest.raises(ConfigurationError) as caught:
        Database(url)
    assert says in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:hunter2@host/db", "postgresql://me:***@host/db"),
        ("postgresql://host/db?user=me&password=hunter2", "?password=***"),
        ("postgresql://host/db?sslpassword=hunter2&sslmode=require", "sslpassword=***"),
        ("postgresql://me:hunter2@host:port/db", "(not a database URL)"),
        ("sqlite:////a/b.sqlite3", "sqlite:////a/b.sqlite3"),
    ],
)
def test_no_password_is_shown(url: str, shown: str) -> None:
    """G5: neither before the host nor among the options."""
    assert shown in redact(url)
    assert "hunter2" not in redact(url)


def test_an_unknown_option_of_the_driver() -> None:
    database = Database("postgresql://me@127.0.0.1:1/db?nonsense=1")
    with pytest.raises(ConfigurationError, match=r'cannot be used .*invalid connection option "nonsense"'):
        check(database, build_tables())


@pytest.mark.postgresql
def test_what_the_operator_says_of_connections_wins(postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction that stands still is ended where that was asked for; options of URL and environment stay."""
    monkeypatch.setenv("PGOPTIONS", "-c work_mem=1MB")
    shown = [shown_by(postgresql_url), shown_by(postgresql_url, end_standstills_ms=7_000)]
    assert shown == [("0", "1MB", "celery-durable"), ("7s", "1MB", "celery-durable")]
    url = f"{postgresql_url}?application_name=mine&options=-c%20idle_in_transaction_session_timeout%3D0"
    assert shown_by(url, end_standstills_ms=7_000) == ("0", "4MB", "mine")


def shown_by(url: str, end_standstills_ms: int | None = None) -> tuple[str, ...]:
    """The session's own settings."""
    database = Database(url)
    if end_standstills_ms is not None:
        database.end_standstills(end_standstills_ms)
    names = ("idle_in_transaction_session_timeout", "work_mem", "application_name")
    with database.reading() as connection:
        shown = tuple(connection.exec_driver_sql(f"SHOW {name}").scalar_one() for name in names)
    database.dispose()
    return shown


@pytest.mark.postgresql
def test_nothing_stays_open_of_threads_that_outlive_the_end(postgresql_url: str) -> None:
    """A connection that comes back after `dispose` is closed: the pool that it came from is no more."""
    database, onlooker = Database(postgresql_url), Database(postgresql_url)
    threads, holding, end = [], threading.Barrier(3), threading.Event()

    def hold() -> None:
        database.held()
        holding.wait(30)
        end.wait(30)

    def transact() -> None:
        with database.transaction():
            holding.wait(30)
            end.wait(30)

    for target in (hold, transact):
        threads.append(threading.Thread(target=target))
        threads[-1].start()
    holding.wait(30)
    database.dispose()
    end.set()
    for thread in threads:
        thread.join(30)

    def others() -> int:
        with onlooker.reading() as connection:
            return int(connection.exec_driver_sql(OTHERS).scalar_one())

    wait_until(lambda: others() == 0, what="no connection")
    onlooker.dispose()


OTHERS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
    "AND backend_type = 'client backend'"
)
