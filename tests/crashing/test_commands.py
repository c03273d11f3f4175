"""Whoever enqueues, cancels, commands or migrates kills itself at each crash point of that, and does it once more.

Nothing else runs: a row is there or not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import inspect

from celery_durable.crashpoints import POINTS
from celery_durable.runtime import runtime_of
from celery_durable.store.database import Database
from celery_durable.store.migrate import migrate
from celery_durable.store.schema import CANCELLED, QUEUED, SUCCEEDED
from holder_service import life, semaphore
from holder_service.migrations import HOLDER
from holder_service.store import Row, Write, all_rows, build_tables, write_rows
from tests.crashing.orders import Orders
from tests.e2e.observe import operation, rows
from tests.harness import REPOSITORY, Kafka, Service, Stack

pytestmark = pytest.mark.processes

ID = "order-81"
NOWHERE = Kafka("127.0.0.1:1", "mock")


class Scene:
    """A service and a holder's database that nobody runs."""

    def __init__(self, stack: Stack) -> None:
        self.service: Service = stack.service()
        self.holder = Database(f"sqlite:///{stack.folder / 'holder.sqlite3'}")
        self.holder_tables = build_tables()
        migrate(self.holder, self.holder_tables, migrations=HOLDER)
        self.fresh = f"sqlite:///{stack.folder / 'fresh.sqlite3'}"
        self.orders = Orders(stack.folder / "orders")

    def run(self, words: list[str], **env: str) -> subprocess.CompletedProcess[str]:
        """Runs Python with these words, obeying the orders."""
        holder = {"HOLDER_DATABASE_URL": str(self.holder.url)}
        return subprocess.run(
            [sys.executable, *words],
            cwd=REPOSITORY,
            env={**os.environ, **self.service.env, **holder, **env, **self.orders.env},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def enqueue(self) -> None:
        """One operation, as the command under test enqueues it."""
        self.service.task("work").apply_async(("acme",), task_id=ID)

    def state(self) -> str | None:
        """Of that operation."""
        found = rows(self.service, "operations", "state", id=ID)
        return found[0][0] if found else None

    def succeed(self) -> None:
        """The operation has ended with a result."""
        self.enqueue()
        runtime = runtime_of(self.service.app)
        operations = runtime.tables.operations
        ended = operations.update().values(state=SUCCEEDED, ended_at=1, result=b"1")
        with runtime.database.transaction("worker.succeed") as connection:
            connection.execute(ended)

    def lose_topic(self) -> None:
        """The holder waits for an operator's word."""
        with self.holder.transaction("life.begin") as connection:
            life.begin(connection, self.holder_tables, "topic_lost")

    def phase(self) -> str:
        """Of the holder's database."""
        with self.holder.reading() as connection:
            found = life.load(connection, self.holder_tables)
        assert found is not None
        return found.phase

    def wait_for_clients(self) -> None:
        """One of the holder's accounts waits for clients to acknowledge an epoch."""
        waiting = semaphore.rebuilding_account("acme", 1)
        with self.holder.transaction("life.begin") as connection:
            life.begin(connection, self.holder_tables, "ready")
            row = Row("acme", partition=0, version=1, due_at_ms=None, state=waiting)
            write_rows(connection, self.holder_tables, [Write("acme", None, row)])

    def waits(self) -> bool:
        """Whether it still does."""
        with self.holder.reading() as connection:
            return any(row.state.rebuilding for found in all_rows(connection, self.holder_tables) for row in found)

    def tables(self, url: str) -> int:
        """How many tables a database has."""
        database = Database(url)
        try:
            return len(inspect(database.engine).get_table_names())
        finally:
            database.dispose()


def in_python(code: str) -> list[str]:
    """A script of the service's."""
    return ["-c", f"from tests.example.app import app; work = app.tasks['example.work']; {code}"]


CELERY = ["-m", "celery", "-A", "tests.example.app", "durable"]
HOLDER_SERVICE = ["-m", "holder_service.cli"]
CALLS = "[work.s('acme', n).set(task_id=str(n)) for n in range(4)]"


@dataclass(frozen=True)
class Case:
    """A command that passes a place.

    :param look: what it is to change.
    :param before: what that shows at first, and after a crash before the commit.
    :param after: and after one that was too late.
    :param done: and at the end.
    :param prepare: what must be there.
    :param again: its exit code when the crashed one had done all.
    """

    words: list[str]
    look: Callable[[Scene], Any]
    before: Any
    after: Any
    done: Any
    prepare: Callable[[Scene], None] = lambda scene: None
    again: int = 0


CASES = {
    "enqueue.one": Case(
        in_python(f"work.apply_async(('acme',), task_id='{ID}')"), Scene.state, before=None, after=QUEUED, done=QUEUED
    ),
    "enqueue.many": Case(
        in_python(f"work.enqueue_many({CALLS}, batch_rows=2)"),
        lambda scene: len(rows(scene.service, "operations", "id")),
        before=0,
        after=2,
        done=4,
    ),
    "commands.stage": Case(
        in_python("from celery_durable.commands import pause; pause('acme', by='me', why='a test', app=app)"),
        lambda scene: rows(scene.service, "outbox", "slot"),
        before=[],
        after=[("pause",)],
        done=[("pause",)],
    ),
    "results.cancel": Case(
        in_python(f"work.AsyncResult('{ID}').cancel()"),
        Scene.state,
        before=QUEUED,
        after=CANCELLED,
        done=CANCELLED,
        prepare=Scene.enqueue,
    ),
    "results.forget": Case(
        in_python(f"work.AsyncResult('{ID}').forget()"),
        lambda scene: operation(scene.service, ID).result,
        before=b"1",
        after=None,
        done=None,
        prepare=Scene.succeed,
    ),
    "results.purge": Case(
        in_python(
            "from celery_durable import purge_before; from datetime import *; "
            "print(purge_before(datetime.now(UTC) + timedelta(hours=1), app=app))"
        ),
        lambda scene: len(rows(scene.service, "operations", "id")),
        before=1,
        after=0,
        done=0,
        prepare=Scene.succeed,
    ),
    "go.begin": Case(
        [*HOLDER_SERVICE, "go", "--all"],
        Scene.phase,
        before="topic_lost",
        after="rebuilding",
        done="rebuilding",
        prepare=Scene.lose_topic,
        again=1,
    ),
    "go.accounts": Case(
        [*HOLDER_SERVICE, "go", "acme"],
        Scene.waits,
        before=True,
        after=False,
        done=False,
        prepare=Scene.wait_for_clients,
    ),
}
MIGRATIONS = {"service": [*CELERY, "migrate"], "holder": [*HOLDER_SERVICE, "migrate"]}
CRASHED = [point for point in POINTS if point.rpartition(".")[0] in CASES]
CRASHED_BY_MIGRATION = [point for point in POINTS if point.startswith("migrate.")]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with Stack(tmp_path, kafka=NOWHERE) as stack:
        yield Scene(stack)


def crash(scene: Scene, point: str, words: list[str], **env: str) -> None:
    """Runs the command until it kills itself at the point."""
    scene.orders.give(point)
    done = scene.run(words, **env)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert scene.orders.died(point)
    scene.orders.withdraw()


@pytest.mark.parametrize("point", CRASHED)
def test_a_command_killed_at(point: str, scene: Scene) -> None:
    """Before the commit it did nothing, after it everything; run again it does what is missing, and nothing twice."""
    place, _, moment = point.rpartition(".")
    case, late = CASES[place], moment == "after_commit"
    case.prepare(scene)
    assert case.look(scene) == case.before
    crash(scene, point, case.words)
    assert case.look(scene) == (case.after if late else case.before)
    again = scene.run(case.words)
    assert again.returncode == (case.again if late else 0), again.stderr
    assert case.look(scene) == case.done


@pytest.mark.postgresql
@pytest.mark.parametrize("point", [point for point in CRASHED if point.startswith("enqueue.one.")])
def test_an_enqueue_on_postgresql_killed_at(point: str, tmp_path: Path, postgresql_server: str) -> None:
    """There it is one statement in autocommit."""
    with Stack(tmp_path, kafka=NOWHERE, postgresql=postgresql_server) as stack:
        test_a_command_killed_at(point, Scene(stack))


@pytest.mark.parametrize("point", CRASHED_BY_MIGRATION)
@pytest.mark.parametrize("side", MIGRATIONS)
def test_a_migration_killed_at(point: str, side: str, scene: Scene) -> None:
    """The schema is as it was, or complete."""
    words, env = MIGRATIONS[side], {}
    if side == "holder":
        env = {"HOLDER_DATABASE_URL": scene.fresh}
    else:
        scene.service.settings["database_url"] = scene.fresh
    crash(scene, point, words, **env)
    assert bool(scene.tables(scene.fresh)) == point.endswith("after_commit")
    again = scene.run(words, **env)
    assert again.returncode == 0, again.stderr
    assert scene.tables(scene.fresh) > 3
