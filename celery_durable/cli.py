"""``celery -A <app> durable …``: everything an operator of one service runs.

Celery imports this module whenever ``celery`` runs, so whatever a command needs is imported inside it. A wrong setting
or a missing schema is one line on stderr and exit code 2; anything else that fails by design is one line and 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec

import click

from celery_durable import spool
from celery_durable.console import plainly
from celery_durable.errors import ConfigurationError

if TYPE_CHECKING:
    from celery import Celery

    from celery_durable.runtime import Runtime

P = ParamSpec("P")

LINES_MAX = 1_000_000

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


def _refuse_plainly() -> None:
    """Has Celery's command line print a wrong declaration in the app's module as it prints one found later.

    While it loads the app it prints the traceback of whatever is raised. This module is a plugin, loaded just before.
    """
    celery_cli = sys.modules.get("celery.bin.celery")
    find_app = getattr(celery_cli, "find_app", None)
    if celery_cli is None or find_app is None or hasattr(find_app, "__wrapped__"):
        return

    @wraps(find_app)
    def find_app_plainly(*args: Any, **kwargs: Any) -> Any:
        try:
            return find_app(*args, **kwargs)
        except ConfigurationError as error:
            error.show()
            sys.exit(error.exit_code)

    celery_cli.find_app = find_app_plainly  # type: ignore[attr-defined]


_refuse_plainly()
spool.register()  # for commands that load no durable task


def _plainly(command: Callable[P, int | None]) -> Callable[P, None]:
    """As :func:`~celery_durable.console.plainly`, and turns the returned number into the exit code."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with plainly():
            code = command(*args, **kwargs)
        if code:
            sys.exit(code)

    return run


def _app(context: click.Context) -> Celery:
    if context.find_root().params.get("app") is None:
        raise click.UsageError("which app? Use: celery -A <module> durable …, or set the environment variable APP")
    app: Celery = context.obj.app
    app.loader.import_default_modules()
    app.finalize()  # the tasks' declarations are checked when they are bound
    return app


def _runtime(context: click.Context, *, checked: bool = True) -> Runtime:
    """The app's runtime; ``checked``: with the schema that this code needs."""
    from celery_durable.runtime import runtime_of

    runtime = runtime_of(_app(context))
    if checked:
        from celery_durable.store.migrate import check

        check(runtime.database, runtime.tables)
    return runtime


@click.group()
def durable() -> None:
    """Durable operations and their permits (celery-durable)."""


@durable.command()
@click.option("--loglevel", "-l", type=click.Choice(_LEVELS, case_sensitive=False), default="INFO", show_default=True)
@click.pass_context
@_plainly
def dispatcher(context: click.Context, loglevel: str) -> int:
    """Run a dispatcher until SIGTERM or Ctrl-C: it admits, sends and recovers operations.

    Run one or more for each service; they share the work, and any of them may die.
    """
    app = _app(context)
    _runtime(context)
    app.log.setup_logging_subsystem(loglevel=loglevel.upper())
    from celery_durable.dispatcher.main import run

    return run(app)


@durable.command()
@click.option("--to", default="head", show_default=True, help="The revision to go up to.")
@click.pass_context
@_plainly
def migrate(context: click.Context, to: str) -> None:
    """Make or update the service's tables. Safe to run from several processes at once."""
    from celery_durable.store.migrate import migrate as migrate_database

    runtime = _runtime(context, checked=False)
    revision = migrate_database(runtime.database, runtime.tables, to)
    click.echo(f"The tables {runtime.tables.prefix}… are at revision {revision}.")


@durable.group()
def topics() -> None:
    """Kafka topics of the service."""


@topics.command("apply")
@click.option("--check", is_flag=True, help="Create nothing, only print what differs.")
@click.pass_context
@_plainly
def apply_topics(context: click.Context, check: bool) -> int:
    """Create the topics that are missing, and print what differs in those that are there.

    Exits 1 if something differs. Nothing that exists is changed.
    """
    from celery_durable.kafka.topics import apply, client_topics, report

    settings = _runtime(context, checked=False).settings
    return report(apply(settings, client_topics(settings, settings.client_id), create=not check))


@durable.command()
@click.option("--pool", default="prefork", show_default=True, help="The worker's pool.")
@click.option("--concurrency", "-c", type=click.IntRange(1), default=2, show_default=True, help="Tasks at once.")
@click.option(
    "--data", type=click.Path(file_okay=False), default=".durable", show_default=True, help="Folder of all its files."
)
@click.pass_context
@_plainly
def up(context: click.Context, pool: str, concurrency: int, data: str) -> int:
    """Run everything on this machine: embedded Kafka, SQLite, holder, dispatcher and worker. Ctrl-C ends it."""
    from pathlib import Path

    from celery_durable.up import run

    _app(context)
    return run(context.find_root().params["app"], folder=Path(data), pool=pool, concurrency=concurrency)


def _known_states(_context: click.Context, _parameter: click.Parameter, states: tuple[str, ...]) -> tuple[str, ...]:
    from celery_durable.store.schema import STATES

    for state in states:
        if state not in STATES:
            raise click.BadParameter(f"{state!r}: there is no such state; use {', '.join(STATES)}")
    return states


@durable.command()
@click.option("--account", help="Only this account's.")
@click.option(
    "--state",
    "states",
    multiple=True,
    callback=_known_states,
    help="Only these states; may be repeated. Default: all not ended.",
)
@click.option("--limit", type=click.IntRange(1, LINES_MAX), default=100, show_default=True, help="Lines at most.")
@_json
@click.pass_context
@_plainly
def ps(context: click.Context, account: str | None, states: tuple[str, ...], limit: int, as_json: bool) -> None:
    """List operations, and why each waits."""
    from celery_durable.monitoring import inspect, printing

    found = inspect.ps(_runtime(context), account=account, states=states, limit=limit)
    _show(found, printing.operations, as_json)


@durable.command()
@click.argument("operation_id", metavar="ID")
@_json
@click.pass_context
@_plainly
def why(context: click.Context, operation_id: str, as_json: bool) -> None:
    """Explain where an operation is: which limit, how many before it, who holds the permits."""
    from celery_durable.monitoring import inspect, printing

    _show(inspect.why(_runtime(context), operation_id), printing.explanation, as_json)


@durable.command()
@click.option("--limit", type=click.IntRange(1, LINES_MAX), default=1_000, show_default=True, help="Accounts at most.")
@_json
@click.pass_context
@_plainly
def accounts(context: click.Context, limit: int, as_json: bool) -> None:
    """List accounts: limit, in use, waiting."""
    from celery_durable.monitoring import inspect, printing

    _show(inspect.accounts(_runtime(context), limit=limit), printing.accounts, as_json)


def _show(found: Any, as_text: Callable[[Any], None], as_json: bool) -> None:
    if as_json:
        plain = [asdict(each) for each in found] if isinstance(found, list) else asdict(found)
        click.echo(json.dumps(plain, indent=2, ensure_ascii=False, default=_plain))
    else:
        as_text(found)


def _plain(value: Any) -> Any:
    from pydantic import BaseModel

    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} has no JSON form")
