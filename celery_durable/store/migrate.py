"""Schema migrations of a service's database, and by the same means of a holder's.

Revisions are Alembic's, one straight line of them, and only go up: the way back is a backup. They run in one
transaction, so a migration that fails leaves the schema as it was.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import as_file, files
from typing import Any, Protocol

from alembic import op
from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, MetaData, inspect, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.schema import CreateSchema

from celery_durable.errors import ConfigurationError, SchemaError
from celery_durable.store.database import Database


class TableSet(Protocol):
    """Tables under one prefix and schema."""

    @property
    def metadata(self) -> MetaData:
        """All of them; its schema is theirs."""
        ...

    @property
    def prefix(self) -> str:
        """First part of every table's name."""
        ...


@dataclass(frozen=True, slots=True)
class Migrations:
    """A line of revisions."""

    package: str
    """The package whose folder ``versions`` holds them."""
    command: str
    """What an operator runs to migrate, for messages."""


CLIENT = Migrations("celery_durable.store.migrations", "celery -A <app> durable migrate")
"""The revisions of a service's tables."""


def migrate(database: Database, tables: TableSet, to: str = "head", migrations: Migrations = CLIENT) -> str:
    """Brings the schema up to the revision ``to`` and returns the revision it has then.

    Safe to run from several processes at once: one does the work, the others wait for it and find it done. It makes
    a PostgreSQL schema that is not there yet. It uses one connection.

    :raises SchemaError: the schema is newer than this code or than ``to``.
    :raises ConfigurationError: there is no such revision, or the database cannot be reached.
    """
    with _loaded(migrations) as loaded:
        script = loaded.script
        target = _resolve(script, to)
        with _reaching(database), database.transaction() as connection:
            _lock(connection, tables)
            found = _context(connection, tables).get_current_revision()
            position = _position(script, found)
            if position is None:
                raise _newer(database, tables, found, script)
            if found is not None and position > (_position(script, target) or 0):
                raise SchemaError(
                    f"The schema of {_where(database, tables)} has revision {found}, newer than {target}: migrations "
                    "only go up. To go back, restore a backup"
                )
            if found != target:
                _upgrade(connection, tables, loaded, target)
    return target


def check(database: Database, tables: TableSet, migrations: Migrations = CLIENT) -> None:
    """Makes sure that the database has exactly the schema of this code; every process does so as it starts.

    :raises SchemaError: the schema is missing, older or newer; the message says what to do.
    :raises ConfigurationError: the database cannot be reached.
    """
    with _loaded(migrations) as loaded:
        script = loaded.script
        with _reaching(database), database.reading() as connection:
            found = _context(connection, tables).get_current_revision()
        where = _where(database, tables)
        if found is None:
            raise SchemaError(f"There are no tables in {where}: run `{migrations.command}`")
        if _position(script, found) is None:
            raise _newer(database, tables, found, script)
        head = _resolve(script, "head")
        if found != head:
            raise SchemaError(
                f"The schema of {where} has revision {found}, this code needs {head}: run `{migrations.command}`"
            )


def table_names() -> tuple[str, str | None]:
    """For revisions: the prefix and the schema of the tables that are being migrated."""
    options = op.get_context().opts
    return options["table_prefix"], options["version_table_schema"]


class _loaded:  # noqa: N801 - used as a context manager only
    """The scripts of a line of revisions, as files for as long as they are in use."""

    def __init__(self, migrations: Migrations) -> None:
        self._folder = as_file(files(migrations.package))
        self.config = Config()
        self.script: ScriptDirectory

    def __enter__(self) -> _loaded:
        folder = self._folder.__enter__()
        self.config.set_main_option("script_location", str(folder).replace("%", "%%"))
        self.config.set_main_option("path_separator", "os")
        self.script = ScriptDirectory.from_config(self.config)
        return self

    def __exit__(self, *error: Any) -> None:
        self._folder.__exit__(*error)


class _reaching:  # noqa: N801 - used as a context manager only
    """Turns a database that does not answer into one clear line."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OperationalError):
            reason = " ".join(str(error.orig).split())
            url = self._database.url.render_as_string(hide_password=True)
            raise ConfigurationError(
                f"database_url = {url}: the database does not answer ({reason}); start it or correct the URL"
            ) from None


def _options(tables: TableSet) -> dict[str, Any]:
    return {
        "version_table": f"{tables.prefix}alembic_version",
        "version_table_schema": tables.metadata.schema,
        "table_prefix": tables.prefix,
    }


def _context(connection: Connection, tables: TableSet) -> MigrationContext:
    return MigrationContext.configure(connection, opts=_options(tables))


def _upgrade(connection: Connection, tables: TableSet, loaded: _loaded, target: str) -> None:
    schema = tables.metadata.schema
    if schema is not None and not inspect(connection).has_schema(schema):
        connection.execute(CreateSchema(schema))

    def steps(revision: Any, _context: Any) -> Any:
        return loaded.script._upgrade_revs(target, revision)

    environment = EnvironmentContext(loaded.config, loaded.script, fn=steps, destination_rev=target)
    with environment:
        # The transaction is the caller's: SQLite keeps DDL in one too, which Alembic does not expect by itself.
        environment.configure(connection=connection, transactional_ddl=True, **_options(tables))
        environment.run_migrations()


def _lock(connection: Connection, tables: TableSet) -> None:
    """Keeps other migrations of these tables out until the transaction ends (case F7)."""
    if connection.dialect.name == "postgresql":
        name = f"celery-durable migrate {tables.metadata.schema} {tables.prefix}"
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], signed=True)
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": key})
    # On SQLite the transaction began with BEGIN IMMEDIATE, which keeps every other writer out.


def _line(script: ScriptDirectory) -> list[str]:
    """The revisions, oldest first."""
    return [each.revision for each in script.walk_revisions()][::-1]


def _resolve(script: ScriptDirectory, name: str) -> str:
    line = _line(script)
    if name == "head":
        return line[-1]
    if name not in line:
        raise ConfigurationError(f"--to {name}: there is no such revision; use head or one of {', '.join(line)}")
    return name


def _position(script: ScriptDirectory, revision: str | None) -> int | None:
    """Where the revision is in the line, 0 for no revision yet; None: this code does not know it."""
    line = [None, *_line(script)]
    return line.index(revision) if revision in line else None


def _newer(database: Database, tables: TableSet, found: str | None, script: ScriptDirectory) -> SchemaError:
    return SchemaError(
        f"The schema of {_where(database, tables)} has revision {found}, which is newer than this code "
        f"({_resolve(script, 'head')}): install the release of celery-durable that made it, or a later one"
    )


def _where(database: Database, tables: TableSet) -> str:
    url = database.url.render_as_string(hide_password=True)
    schema = "" if tables.metadata.schema is None else f", schema {tables.metadata.schema}"
    return f"{url} (tables {tables.prefix}…{schema})"
