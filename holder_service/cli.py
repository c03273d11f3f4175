"""``holder-service``: runs the holder, and what an operator needs beside it.

Exit codes: 0 done, 1 the command could not be obeyed or found a difference, 2 a setting or the surroundings are wrong.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from celery_durable.console import plainly, wide_console
from celery_durable.errors import ConfigurationError
from holder_service import settings as settings_module
from holder_service.settings import HolderSettings
from holder_service.usage import Usage

if TYPE_CHECKING:
    from celery_durable.store.database import Database
    from holder_service.store import HolderTables

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_KAFKA_NEEDED = ("database_url", "kafka_bootstrap_servers")


class _Group(click.Group):
    """Prints what is wrong in one line."""

    def invoke(self, ctx: click.Context) -> Any:
        with plainly():
            return super().invoke(ctx)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-l", "--loglevel", default="INFO", show_default=True, help="Lowest level that is logged, to stderr.")
def main(loglevel: str) -> None:
    """The holder of celery-durable's permits. Settings: environment HOLDER_* and a .env file."""
    level = logging.getLevelNamesMapping().get(loglevel.upper())
    if level is None:
        raise ConfigurationError(f"--loglevel {loglevel}: no such level; use DEBUG, INFO, WARNING or ERROR")
    logging.basicConfig(level=level, format=LOG_FORMAT, stream=sys.stderr, force=True)


@main.command()
def run() -> None:
    """Runs a holder in the foreground until SIGTERM or Ctrl-C. Several share the work."""
    from holder_service.main import run as run_holder

    sys.exit(run_holder(settings_module.load(required=_KAFKA_NEEDED)))


@main.command()
@click.option("--to", default="head", show_default=True, help="Revision to migrate to.")
def migrate(to: str) -> None:
    """Make or update the holder's tables. Safe to run from several processes at once."""
    from celery_durable.store.migrate import migrate as migrate_tables
    from holder_service.migrations import HOLDER

    with _opened(settings_module.load(), checked=False) as (database, tables):
        revision = migrate_tables(database, tables, to, HOLDER)
        click.echo(f"The tables {tables.prefix}… are at revision {revision}.")


@main.command()
@click.argument("account", required=False)
@click.option("--all", "everything", is_flag=True, help="In all accounts.")
def go(account: str | None, everything: bool) -> None:
    """Stops waiting for clients that have not acknowledged a new epoch, in ACCOUNT or in all.

    What such a client still has in use is then no longer counted: say it when nothing of it runs any more.
    """
    from holder_service import commands

    if (account is None) != everything:
        raise click.UsageError("give one ACCOUNT, or --all")
    with _opened(settings_module.load()) as (database, tables):
        waited = commands.go(database, tables, account)
    click.echo(f"accounts that waited and now go on: {waited}")


@main.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
def accounts(as_json: bool) -> None:
    """Lists the accounts: limit, where it comes from, in use, waiting, footprint; also of each group and client."""
    from holder_service import commands

    settings = settings_module.load()
    with _opened(settings) as (database, tables):
        found = commands.usages(database, tables, settings.semaphore())
        if as_json:
            click.echo(json.dumps([dataclasses.asdict(usage) for usage in found], indent=2))
        else:
            _print_table(found)


@main.group()
def topics() -> None:
    """Kafka's topics."""


@topics.command()
@click.option("--check", is_flag=True, help="Compare only, create nothing.")
@click.option(
    "--client", "clients", multiple=True, help="A service's client_id: its replies topic too. May be repeated."
)
def apply(check: bool, clients: tuple[str, ...]) -> None:
    """Creates the topics that are missing and prints what differs in those that are there."""
    from celery_durable.kafka import topics as kafka_topics

    settings = settings_module.load(required=("kafka_bootstrap_servers",))
    plans = kafka_topics.holder_topics(settings, clients, replies_partitions=settings.replies_partitions)
    sys.exit(kafka_topics.report(kafka_topics.apply(settings, plans, create=not check)))


@contextmanager
def _opened(settings: HolderSettings, *, checked: bool = True) -> Iterator[tuple[Database, HolderTables]]:
    """The database and its tables, which must have this code's schema if ``checked``."""
    from celery_durable.store.migrate import check
    from holder_service.main import open_database
    from holder_service.migrations import HOLDER
    from holder_service.store import build_tables

    database, tables = open_database(settings), build_tables(settings.table_prefix, settings.database_schema)
    try:
        if checked:
            check(database, tables, HOLDER)
        yield database, tables
    finally:
        database.dispose()


def _print_table(found: Iterable[Usage]) -> None:
    from rich.table import Table

    table = Table(title="Accounts", title_justify="left")
    for name in ("account / group, client", "limit", "source"):
        table.add_column(name, overflow="fold")
    for name in ("in use", "waiting", "footprint"):
        table.add_column(name, justify="right")
    table.add_column("remarks")
    empty = True
    for usage in found:
        empty = False
        remarks = "paused" if usage.paused else ""
        counts = (str(usage.in_use), str(usage.waiting), str(usage.footprint))
        table.add_row(_plain(usage.account), str(usage.limit), _plain(usage.source), *counts, remarks, style="bold")
        for group in usage.groups:
            limit = "" if group.limit is None else str(group.limit)
            counts = (str(group.in_use), str(group.waiting), str(group.footprint))
            table.add_row(_plain(f"  group {group.group}"), limit, "", *counts, "")
        for client in usage.clients:
            counts = (str(client.in_use), str(client.waiting), str(client.footprint))
            heard = f"{client.last_report_ms / 1000:.0f} s ago"
            remarks = f"{heard}, must answer" if client.must_acknowledge else heard
            table.add_row(_plain(f"  {client.client_id}"), "", "", *counts, remarks)
    if empty:
        click.echo("no account has anything in use or waiting")
    else:
        wide_console().print(table)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


if __name__ == "__main__":
    main()
