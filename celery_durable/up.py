"""``celery -A app durable up``: one service with everything it needs, on one machine, in one terminal.

It starts an embedded Kafka in this process and the holder, a dispatcher and a worker as children, on SQLite and on a
folder as Celery's broker (:mod:`celery_durable.spool`). What the user configured is used instead, never overridden:
the children get defaults through their environment, and only those that nobody gave. With a Kafka that was configured
there is a holder elsewhere already; a second one with another database would be wrong, so none is started unless
``HOLDER_DATABASE_URL`` says so too.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click
from celery.app.utils import find_app
from dotenv import dotenv_values

from celery_durable import settings as settings_module
from celery_durable import spool
from celery_durable.errors import ConfigurationError
from celery_durable.kafka.settings import NAME_CHARACTERS
from celery_durable.settings import ENV_PREFIX, Settings
from celery_durable.store.database import Database, redact
from celery_durable.supervisor import Supervisor

if TYPE_CHECKING:
    from celery import Celery

EMBEDDED_FETCH_WAIT_MS = "30"
"""The embedded broker never wakes a waiting fetch: a message waits up to this long, and an idle reader asks as often.

At 20 ms each of holder and dispatcher cost 0.8 to 0.9 % of a core, at 10 ms 1.0 %, at 5 ms 1.6 %.
"""
EMBEDDED_REBALANCE_MS = 3_000
"""librdkafka's ``test.mock`` default for a group's first rebalance."""
CHECK_EVERY_S = 0.2
SHUTDOWN_S = 20.0
"""How long running tasks may go on after Ctrl-C. What is killed then runs again after the next start."""

_SESSION = "kafka_session_timeout_ms"
_COLOURS = {"up": "white", "holder": "magenta", "dispatcher": "cyan", "worker": "green"}


@dataclass
class Setup:
    """What ``up`` starts, and the defaults that it adds to the environment of each part."""

    client: dict[str, str]
    holder: dict[str, str] | None
    """None: no holder is started."""
    migrates_client: bool
    migrates_holder: bool
    embedded_kafka: bool
    facts: list[str] = field(default_factory=list)
    """What the user should know, a line each."""

    def with_kafka(self, bootstrap_servers: str) -> Setup:
        """The same with the address of the embedded Kafka."""
        for env, prefix in ((self.client, ENV_PREFIX), (self.holder, "HOLDER_")):
            if env is not None:
                env[f"{prefix}KAFKA_BOOTSTRAP_SERVERS"] = bootstrap_servers
        return self


def choose(app: Celery, name: str, folder: Path, environment: Mapping[str, str | None] | None = None) -> Setup:
    """Decides what to start and which defaults are missing.

    :param name: how the command line names the app; the client's name where the app has none.
    :param environment: variables that are set; None: this process's environment and ``.env``.
    :raises ConfigurationError: a setting that was given is wrong.
    """
    settings = settings_module.load(app, required=())
    configured = {**dotenv_values(".env"), **os.environ} if environment is None else environment
    client: dict[str, str] = {}
    if not settings.client_id:
        client["CLIENT_ID"] = re.sub(
            rf"[^{NAME_CHARACTERS}]", "-", app.main or name.partition(":")[0].rpartition(".")[2]
        )
    client_id = settings.client_id or client["CLIENT_ID"]
    database_url = settings.database_url.get_secret_value()
    if not database_url:
        database_url = client["DATABASE_URL"] = f"sqlite:///{folder.resolve() / client_id}.sqlite3"
    embedded = not settings.kafka_bootstrap_servers
    if embedded:
        _require_session_timeout(settings, configured)
    if embedded and "kafka_fetch_wait_max_ms" not in settings.model_fields_set:
        client["KAFKA_FETCH_WAIT_MAX_MS"] = EMBEDDED_FETCH_WAIT_MS
    given = {key.upper() for key, value in configured.items() if value}
    holder = _holder(given, settings, folder) if embedded or "HOLDER_DATABASE_URL" in given else None
    env = {ENV_PREFIX + key: value for key, value in client.items()}
    shell = " ".join(f"{key}={value}" for key, value in env.items() if not key.endswith("FETCH_WAIT_MAX_MS"))
    if not (app.conf.broker_url or app.conf.broker_read_url):
        env["CELERY_BROKER_URL"] = spool.url(folder / "broker")
    broker = env.get("CELERY_BROKER_URL")
    setup = Setup(
        client=env,
        holder=holder,
        migrates_client=Database(database_url, schema=settings.database_schema).dialect == "sqlite",
        migrates_holder=holder is not None and "HOLDER_DATABASE_URL" in holder,
        embedded_kafka=embedded,
    )
    setup.facts = [f"client {client_id} on {redact(database_url)}"]
    if shell:
        setup.facts.append(f"to call tasks from another shell: export {shell}")
    if broker:
        setup.facts.append(
            f"for celery inspect, control and Flower from another shell: export CELERY_BROKER_URL={broker}"
        )
    if holder is None:
        setup.facts.append("no holder is started: Kafka is configured, so its holder runs elsewhere")
    return setup


def _require_session_timeout(settings: Settings, configured: Mapping[str, str | None]) -> None:
    holder = next((value for key, value in configured.items() if key.upper() == f"HOLDER_{_SESSION}".upper()), None)
    timeouts = {ENV_PREFIX: settings.kafka_session_timeout_ms}
    if holder is not None and holder.isdecimal():
        timeouts["HOLDER_"] = int(holder)
    for prefix, timeout_ms in timeouts.items():
        if timeout_ms <= EMBEDDED_REBALANCE_MS:
            raise ConfigurationError(
                f"{_SESSION} = {timeout_ms}: the embedded Kafka gives the first member of a group its partitions after "
                f"{EMBEDDED_REBALANCE_MS} ms, and one with a shorter session never; set {prefix}{_SESSION.upper()} to "
                f"{2 * EMBEDDED_REBALANCE_MS} or more, or configure a Kafka"
            )


def _holder(given: set[str], settings: Settings, folder: Path) -> dict[str, str]:
    defaults = {
        "HOLDER_DATABASE_URL": f"sqlite:///{folder.resolve() / 'holder'}.sqlite3",
        "HOLDER_TOPIC_PREFIX": settings.topic_prefix,
    }
    if settings.kafka_bootstrap_servers:
        defaults["HOLDER_KAFKA_BOOTSTRAP_SERVERS"] = settings.kafka_bootstrap_servers
    else:
        defaults["HOLDER_KAFKA_FETCH_WAIT_MAX_MS"] = EMBEDDED_FETCH_WAIT_MS
    return {key: value for key, value in defaults.items() if key not in given}


def run(name: str, *, folder: Path, pool: str = "prefork", concurrency: int = 2) -> int:
    """Runs everything until Ctrl-C or SIGTERM, and returns the exit code.

    A child that dies is restarted with a growing pause. A second Ctrl-C does not wait for running tasks.

    :raises ConfigurationError: a setting is wrong, or another ``up`` uses the folder.
    """
    app = find_app(name)
    chosen = choose(app, name, folder)
    output = Output()
    with ExitStack() as stack:
        stack.enter_context(owned(folder))
        signals = stack.enter_context(_Signals())
        if chosen.embedded_kafka:
            from celery_durable.kafka.embedded import EmbeddedBroker

            chosen = chosen.with_kafka(stack.enter_context(EmbeddedBroker()).bootstrap_servers)
        for fact in chosen.facts:
            output("up", fact)
        supervisor = stack.enter_context(Supervisor(output))
        code = _start(supervisor, chosen, name, pool, concurrency) or None
        if code is None:
            output("up", "Ctrl-C ends everything")
        while code is None:
            if signals.count:
                output("up", "ending; Ctrl-C again does not wait for running tasks")
                supervisor.stop(SHUTDOWN_S, cut_short=lambda: signals.count > 1)
                return 0
            time.sleep(CHECK_EVERY_S)
            code = supervisor.check()
        return code


def _start(supervisor: Supervisor, chosen: Setup, name: str, pool: str, concurrency: int) -> int:
    celery = [sys.executable, "-m", "celery", "-A", name]
    holder = [sys.executable, "-m", "holder_service.cli"]
    if chosen.migrates_client:
        code = supervisor.run([*celery, "durable", "migrate"], chosen.client, name="dispatcher")
        if code != 0:
            return code
    if chosen.migrates_holder:
        code = supervisor.run([*holder, "migrate"], chosen.holder, name="holder")
        if code != 0:
            return code
    if chosen.holder is not None:
        supervisor.start("holder", [*holder, "run"], chosen.holder)
    supervisor.start("dispatcher", [*celery, "durable", "dispatcher"], chosen.client)
    worker = ["worker", "--loglevel", "INFO", "--pool", pool, "--concurrency", str(concurrency)]
    supervisor.start("worker", [*celery, *worker], chosen.client)
    return 0


class Output:
    """Writes whole lines, each with the name of its process in front."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self, name: str, line: str) -> None:
        """Writes one line. May be called from any thread."""
        label = click.style(f"{name:<10} |", fg=_COLOURS.get(name))
        # Nobody reads any more: the children must not block on it.
        with self._lock, suppress(BrokenPipeError):
            click.echo(f"{label} {line}")


class _Signals:
    """Counts SIGINT, SIGTERM and SIGHUP while the context lasts."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> _Signals:
        self._before = {
            number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, *_: object) -> None:
        self.count += 1


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Makes the folder, and keeps any other ``up`` out of it meanwhile.

    :raises ConfigurationError: another one has it, or it cannot be made.
    """
    try:
        if not folder.exists():  # a folder that was there is the user's own: git goes on to see it
            folder.mkdir(parents=True)
            (folder / ".gitignore").write_text("*\n")
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise ConfigurationError(
            f"--data = {folder}: {error.strerror}; give a folder that can be written to, or made"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"--data = {folder}: another `durable up` uses this folder; end it, or give another folder"
            ) from None
        yield
