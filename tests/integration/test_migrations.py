"""The migrated schema is the one of the code, on both databases; migrating is safe at any time (case F7)."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import MetaData, event, inspect, select, text

from celery_durable.errors import ConfigurationError, SchemaError
from celery_durable.store import schema as client
from celery_durable.store.database import Database
from celery_durable.store.migrate import CLIENT, Migrations, check, migrate
from holder_service import store as holder
from holder_service.migrations import HOLDER

SIDES = [
    pytest.param(client.build_tables, CLIENT, id="client"),
    pytest.param(holder.build_tables, HOLDER, id="holder"),
]
Build = Callable[..., Any]


def definitions(database: Database, schema: str | None = None) -> set[tuple[Any, ...]]:
    """Every table, index and constraint as the database itself describes it, without the version table's."""
    if database.dialect == "sqlite":
        query = "SELECT name, sql FROM sqlite_master WHERE name NOT LIKE '%alembic_version%' AND sql IS NOT NULL"
    else:
        query = f"""
            SELECT indexname, replace(indexdef, ' {schema}.', ' ') FROM pg_indexes
            WHERE schemaname = '{schema}' AND indexname NOT LIKE '%alembic_version%'
            UNION ALL
            SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint
            WHERE connamespace = '{schema}'::regnamespace AND conname NOT LIKE '%alembic_version%'
            UNION ALL
            SELECT table_name || '.' || column_name,
                   concat_ws(' ', data_type, character_maximum_length, is_nullable,
                             replace(column_default, '{schema}.', ''))
            FROM information_schema.columns
            WHERE table_schema = '{schema}' AND table_name NOT LIKE '%alembic_version%'
        """
    with database.reading() as connection:
        return {(name, " ".join(sql.split())) for name, sql in connection.execute(text(query))}


@pytest.fixture
def database(database_url: str) -> Any:
    """A fresh database with a pool of one connection and no more."""
    database = Database(database_url, pool_size=1)
    yield database
    database.dispose()


@pytest.mark.parametrize(("build", "migrations"), SIDES)
def test_the_migrated_schema_is_the_one_of_the_code(database: Database, build: Build, migrations: Migrations) -> None:
    tables = build(prefix="my_")
    migrate(database, tables, migrations=migrations)
    check(database, tables, migrations)
    with database.transaction() as connection:
        if database.dialect == "postgresql":
            context = MigrationContext.configure(connection, opts={"version_table": "my_alembic_version"})
            assert compare_metadata(context, tables.metadata) == []
        rows = connection.execute(select(tables.counters)).all()
        assert {value for _, value in rows} == {0}
    migrated = definitions(database, "public")
    with database.transaction() as connection:
        everything = MetaData()
        everything.reflect(connection)
        everything.drop_all(connection)
        tables.metadata.create_all(connection)
    assert migrated == definitions(database, "public")
    assert len(migrated) >= len(tables.metadata.tables)


@pytest.mark.parametrize("migrations", [CLIENT, HOLDER], ids=["client", "holder"])
def test_the_listed_revisions_are_those_that_are_there(migrations: Migrations) -> None:
    folder = Path(str(files(migrations.package)))
    script = ScriptDirectory(str(folder), version_locations=[str(folder / "versions")])
    assert tuple(each.revision for each in script.walk_revisions())[::-1] == migrations.revisions


def test_a_check_does_not_load_alembic(sqlite_url: str) -> None:
    """Every process checks its schema as it starts: that must stay cheap, a worker's too."""
    database = Database(sqlite_url)
    migrate(database, client.build_tables())
    database.dispose()
    script = (
        "import sys; from celery_durable.store.migrate import check; from celery_durable.store.schema import *\n"
        "from celery_durable.store.database import Database\n"
        "check(Database(sys.argv[1]), build_tables()); assert 'alembic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script, sqlite_url], check=True, timeout=60)


@pytest.mark.postgresql
@pytest.mark.parametrize(("build", "migrations"), SIDES)
def test_a_schema_of_its_own_is_made_and_used(postgresql_url: str, build: Build, migrations: Migrations) -> None:
    database = Database(postgresql_url, schema="jobs")
    tables = build(prefix="my_", schema="jobs")
    migrate(database, tables, migrations=migrations)
    check(database, tables, migrations)
    with database.reading() as connection:
        assert inspect(connection).get_table_names(schema="public") == []
        assert "my_alembic_version" in inspect(connection).get_table_names(schema="jobs")
    migrated = definitions(database, "jobs")
    with database.transaction() as connection:
        connection.execute(text("DROP SCHEMA jobs CASCADE"))
        connection.execute(text("CREATE SCHEMA jobs"))
        tables.metadata.create_all(connection)
    assert migrated == definitions(database, "jobs")
    database.dispose()


def test_two_prefixes_live_in_one_database(database: Database) -> None:
    one, other = client.build_tables("one_"), client.build_tables("other_")
    migrate(database, one)
    with pytest.raises(SchemaError, match="There are no tables"):
        check(database, other)
    migrate(database, other)
    migrate(database, holder.build_tables(), migrations=HOLDER)
    check(database, one)
    check(database, other)


def test_migrating_again_changes_nothing(database: Database) -> None:
    tables = client.build_tables()
    assert migrate(database, tables) == migrate(database, tables)


def test_many_at_once_are_safe(database: Database) -> None:
    """Case F7: two processes migrate at once, and a pool of size 1 works."""
    url = database.url.render_as_string(hide_password=False)
    script = (
        "import sys; from celery_durable.store.migrate import migrate; from celery_durable.store.schema import *\n"
        "from celery_durable.store.database import Database\n"
        "sys.stdin.readline(); print(migrate(Database(sys.argv[1], pool_size=1), build_tables()))"
    )
    command = [sys.executable, "-c", script, url]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(3)
    ]
    with ThreadPoolExecutor(3) as pool:
        outputs = list(pool.map(lambda process: process.communicate("go\n", timeout=60)[0], started))
    assert [process.returncode for process in started] == [0, 0, 0], outputs
    check(database, client.build_tables())


def test_it_uses_one_connection_at_a_time(database: Database) -> None:
    """Case F7: a pool of size 1 works."""
    out, most, guard = 0, 0, threading.Lock()

    @event.listens_for(database.engine, "checkout")
    def _checkout(*_: Any) -> None:
        nonlocal out, most
        with guard:
            out += 1
            most = max(most, out)

    @event.listens_for(database.engine, "checkin")
    def _checkin(*_: Any) -> None:
        nonlocal out
        with guard:
            out -= 1

    migrate(database, client.build_tables())
    check(database, client.build_tables())
    assert (out, most) == (0, 1)


def test_a_newer_schema_is_refused(database: Database) -> None:
    """Case F7: a newer schema than the code is refused clearly, and left as it is."""
    tables = client.build_tables()
    migrate(database, tables)
    with database.transaction() as connection:
        connection.execute(text("UPDATE durable_alembic_version SET version_num = '9999'"))
    with pytest.raises(SchemaError, match=r"revision 9999, which is newer than this code.*install the release"):
        check(database, tables)
    with pytest.raises(SchemaError, match="revision 9999, which is newer than this code"):
        migrate(database, tables)


def test_a_missing_schema_names_the_remedy(database: Database) -> None:
    with pytest.raises(SchemaError, match=r"There are no tables in .*run `celery -A <app> durable migrate`"):
        check(database, client.build_tables())
    with pytest.raises(SchemaError, match="run `holder-service migrate`"):
        check(database, holder.build_tables(), HOLDER)


def test_an_unknown_revision_is_refused(database: Database) -> None:
    with pytest.raises(ConfigurationError, match="--to nonsense: there is no such revision; use head or one of 0001"):
        migrate(database, client.build_tables(), to="nonsense")
    assert migrate(database, client.build_tables(), to="0001") == "0001"


def test_a_failing_migration_leaves_nothing(database: Database) -> None:
    with database.transaction() as connection:
        connection.execute(text("CREATE TABLE durable_wakes (no INTEGER)"))
    with pytest.raises(Exception, match="already exists"):
        migrate(database, client.build_tables())
    with database.reading() as connection:
        assert inspect(connection).get_table_names() == ["durable_wakes"]


@pytest.mark.postgresql
def test_an_unreachable_database_is_one_clear_line_without_the_password() -> None:
    """Case G5: a password appears in no error."""
    database = Database("postgresql+psycopg://me:secret@127.0.0.1:1/none")
    for action in (check, migrate):
        with pytest.raises(ConfigurationError, match="the database does not answer") as caught:
            action(database, client.build_tables())
        assert "secret" not in str(caught.value)
        assert "\n" not in str(caught.value)


def test_the_holders_command_prints_one_line(tmp_path: Path) -> None:
    """The revision that was reached, and nothing of Alembic's own set-up."""
    done = subprocess.run(
        [sys.executable, "-m", "holder_service.cli", "migrate"],
        env={**os.environ, "HOLDER_DATABASE_URL": f"sqlite:///{tmp_path / 'holder.sqlite3'}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    line = f"The tables holder_… are at revision {HOLDER.head}.\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, line, "")
