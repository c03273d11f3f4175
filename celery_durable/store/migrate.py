"""Schema migrations of a service's database, and by the same means of a holder's.

Revisions are Alembic's, one straight line of them, and only go up: the way back is a backup. They run in one
transaction, so a migration that fails leaves the schema as it was.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import as_file, files
from typing import Any, Protocol

from sqlalchemy import Connection, MetaData, column, inspect, select, table, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.schema import CreateSchema

from celery_durable.errors import ConfigurationError, SchemaError
from celery_durable.store import migrations as client_migrations
from celery_durable.store.database import Database, file_problem, redact


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
    revisions: tuple[str, ...]
    """Their IDs, oldest first: known without loading Alembic, since every process checks them as it starts."""
    command: str
    """What an operator runs to migrate, for messages."""

    @property
    def head(self) -> str:
        """The revision that this code needs."""
        return self.revisions[-1]


CLIENT = Migrations(client_migrations.__name__, client_migrations.REVISIONS, "celery -A <app> durable migrate")
"""The revisions of a service's tables."""


def migrate(database: Database, tables: TableSet, to: str = "head", migrations: Migrations = CLIENT) -> str:
    """Brings the schema up to the revision ``to`` and returns the revision it has then.

    Safe to run from several processes at once: one does the work, the others wait for it and find it done. It makes
    a PostgreSQL schema that is not there yet. It uses one connection.

    :raises SchemaError: the schema is newer than this code or than ``to``.
    :raises ConfigurationError: there is no such revision, or the database cannot be reached.
    """
    target = migrations.head if to == "head" else to
    if target not in migrations.revisions:
        known = ", ".join(migrations.revisions)
        raise ConfigurationError(f"--to {to}: there is no such revision; use head or one of {known}")
    with _reaching(database), database.transaction("migrate.upgrade") as connection:
        _lock(connection, tables)
        found = _current(connection, tables)
        _refuse_newer(database, tables, found, migrations)
        line = (None, *migrations.revisions)
        if line.index(found) > line.index(target):
            raise SchemaError(
                f"The schema of {_where(database, tables)} has revision {found}, newer than {target}: migrations only "
                "go up. To go back, restore a backup"
            )
        if found != target:
            _upgrade(connection, tables, migrations, target)
    return target


def check(database: Database, tables: TableSet, migrations: Migrations = CLIENT) -> None:
    """Makes sure that the database has exactly the schema of this code; every process does so as it starts.

    :raises SchemaError: the schema is missing, older or newer; the message says what to do.
    :raises ConfigurationError: the database cannot be reached.
    """
    with _reaching(database), database.reading() as connection:
        found = _current(connection, tables)
    if found is None:
        raise SchemaError(f"There are no tables in {_where(database, tables)}: run `{migrations.command}`")
    _refuse_newer(database, tables, found, migrations)
    if found != migrations.head:
        raise SchemaError(
            f"The schema of {_where(database, tables)} has revision {found}, this code needs {migrations.head}: "
            f"run `{migrations.command}`"
        )


def table_names() -> tuple[str, str | None]:
    """For revisions: the prefix and the schema of the tables that are being migrated."""
    from alembic import op

    options = op.get_context().opts
    return options["table_prefix"], options["version_table_schema"]


@contextmanager
def _reaching(database: Database) -> Iterator[None]:
    """Turns a database that does not answer, or that is none or not ours to use, into one clear line."""
    try:
        yield
    except DBAPIError as error:
        if error.orig is not None and (found := file_problem(database.url, error.orig)) is not None:
            raise ConfigurationError(f"database_url = {redact(database.url)}: {found}") from error
        reason = " ".join(str(error.orig).split())
        answers = not isinstance(error, OperationalError)
        problem = f"the database {'cannot be used' if answers else 'does not answer'} ({reason})"
        remedy = "give one that this service may write to" if answers else "start it or correct the URL"
        raise ConfigurationError(f"database_url = {redact(database.url)}: {problem}; {remedy}") from error


def _version_table(tables: TableSet) -> str:
    return f"{tables.prefix}alembic_version"


def _current(connection: Connection, tables: TableSet) -> str | None:
    name, schema = _version_table(tables), tables.metadata.schema
    if not inspect(connection).has_table(name, schema=schema):
        return None
    statement = select(table(name, column("version_num"), schema=schema).c.version_num)
    revision: str | None = connection.scalar(statement)
    return revision


def _upgrade(connection: Connection, tables: TableSet, migrations: Migrations, target: str) -> None:
    schema = tables.metadata.schema
    if schema is not None and not inspect(connection).has_schema(schema):
        connection.execute(CreateSchema(schema))
    with _quiet_alembic(), as_file(files(migrations.package)) as folder:
        from alembic.config import Config
        from alembic.runtime.environment import EnvironmentContext
        from alembic.script import ScriptDirectory

        config = Config()
        config.set_main_option("script_location", str(folder).replace("%", "%%"))
        config.set_main_option("path_separator", "os")
        script = ScriptDirectory.from_config(config)

        def steps(revision: Any, _context: Any) -> Any:
            return script._upgrade_revs(target, revision)

        with EnvironmentContext(config, script, fn=steps, destination_rev=target) as environment:
            # The transaction is the caller's: SQLite keeps DDL in one too, which Alembic does not expect by itself.
            environment.configure(
                connection=connection,
                transactional_ddl=True,
                version_table=_version_table(tables),
                version_table_schema=schema,
                table_prefix=tables.prefix,
            )
            environment.run_migrations()


@contextmanager
def _quiet_alembic() -> Iterator[None]:
    # It logs its own set-up at INFO, line by line, from its import on.
    logger = logging.getLogger("alembic")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _lock(connection: Connection, tables: TableSet) -> None:
    """Keeps other migrations of these tables out until the transaction ends (case F7)."""
    if connection.dialect.name == "postgresql":
        name = f"celery-durable migrate {tables.metadata.schema} {tables.prefix}"
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], signed=True)
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": key})
    # On SQLite the transaction began with BEGIN IMMEDIATE, which keeps every other writer out.


def _refuse_newer(database: Database, tables: TableSet, found: str | None, migrations: Migrations) -> None:
    if found is not None and found not in migrations.revisions:
        raise SchemaError(
            f"The schema of {_where(database, tables)} has revision {found}, which is newer than this code "
            f"({migrations.head}): install the release of celery-durable that made it, or a later one"
        )


def _where(database: Database, tables: TableSet) -> str:
    url = redact(database.url)
    schema = "" if tables.metadata.schema is None else f", schema {tables.metadata.schema}"
    return f"{url} (tables {tables.prefix}…{schema})"
