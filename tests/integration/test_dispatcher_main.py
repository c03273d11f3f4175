"""The dispatcher as a process: how it starts, idles and ends."""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path

import psutil
import pytest
from celery import Celery
from sqlalchemy import text

from celery_durable.dispatcher.main import run
from celery_durable.dispatcher.recovery import Recovery
from celery_durable.errors import ConfigurationError, SchemaError
from celery_durable.runtime import runtime_of
from celery_durable.store.database import STANDSTILL_MIN_MS
from tests.dispatching import Service as Rows
from tests.dispatching import received
from tests.harness import Kafka, Process, Stack, wait_until, within

DROP_OTHERS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
)


def app_with(**durable: object) -> Celery:
    app = Celery("billing", broker="memory://", set_as_current=False)
    app.conf.durable = {"client_id": "billing", **durable}
    return app


def test_without_kafka_it_says_what_to_set(sqlite_url: str) -> None:
    """Bad input "Kafka absent": one clear line with field and remedy."""
    with pytest.raises(ConfigurationError, match=r"kafka_bootstrap_servers is empty.*CELERY_DURABLE_KAFKA_BOOTSTRAP"):
        run(app_with(database_url=sqlite_url))


def test_without_tables_it_says_what_to_run(sqlite_url: str) -> None:
    app = app_with(database_url=sqlite_url, kafka_bootstrap_servers="127.0.0.1:1")
    with pytest.raises(SchemaError, match="durable migrate"):
        run(app)
    runtime_of(app).database.dispose()


def test_another_clients_database_is_refused(sqlite_url: str) -> None:
    rows = Rows(sqlite_url)
    app = app_with(database_url=sqlite_url, client_id="shipping", kafka_bootstrap_servers="127.0.0.1:1")
    with pytest.raises(ConfigurationError, match="belongs to client_id 'billing'"):
        run(app)
    runtime_of(app).database.dispose()
    rows.close()


def test_a_kafka_that_does_not_answer_stops_neither_delivery_nor_the_end(sqlite_url: str) -> None:
    """Kafka down: what needs no permit goes on (design, section 12); stopping takes no longer than shutdown_s."""
    rows = Rows(sqlite_url)
    with socket.create_server(("127.0.0.1", 0)) as hung:
        app = app_with(
            database_url=sqlite_url,
            kafka_bootstrap_servers=f"127.0.0.1:{hung.getsockname()[1]}",
            shutdown_s=2.0,
        )
        stop = threading.Event()
        codes: list[int] = []
        thread = threading.Thread(target=lambda: codes.append(run(app, stop=stop)))
        thread.start()
        rows.add("op", account=None, state="admitted", due_at=1, queue="kafka-down", wakes=False)
        messages: list[object] = []
        wait_until(lambda: messages.extend(received(app, "kafka-down")) or messages, what="the message")
        stop.set()
        with within(20, "the end, though Kafka hangs"):
            thread.join(60)
        assert codes == [0]
    rows.close()


def test_a_loop_that_fails_stops_no_other(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F5: it backs off and says so; delivery goes on, and the failing part once it can."""
    failing = threading.Event()
    failing.set()
    real = Recovery.step

    def step(self: Recovery) -> float | None:
        if failing.is_set():
            raise RuntimeError("no such thing")
        return real(self)

    monkeypatch.setattr(Recovery, "step", step)
    rows = Rows(sqlite_url)
    app = app_with(database_url=sqlite_url, kafka_bootstrap_servers="127.0.0.1:1", shutdown_s=30.0)
    stop = threading.Event()
    thread = threading.Thread(target=run, args=(app,), kwargs={"stop": stop})
    thread.start()
    rows.add("op", account=None, state="admitted", due_at=1, queue="failing-loop", wakes=False)
    rows.add("later", account=None, state="scheduled", due_at=1, queue="failing-loop", wakes=False)
    wait_until(lambda: received(app, "failing-loop"), what="the message")
    failing.clear()
    wait_until(lambda: received(app, "failing-loop"), what="the message of what recovery moved on")
    stop.set()
    thread.join(40)
    assert not thread.is_alive()
    rows.close()


@pytest.mark.postgresql
def test_a_database_that_drops_every_connection_is_used_again(postgresql_url: str) -> None:
    """A restart or a failover of the database: the loops connect anew."""
    rows = Rows(postgresql_url)
    app = app_with(database_url=postgresql_url, kafka_bootstrap_servers="127.0.0.1:1", shutdown_s=30.0)
    stop = threading.Event()
    thread = threading.Thread(target=run, args=(app,), kwargs={"stop": stop})
    thread.start()
    for round_ in range(3):
        queue = f"dropped-{round_}"
        rows.add(f"op{round_}", account=None, state="admitted", due_at=1, queue=queue, wakes=False)
        rows.add(f"later{round_}", account=None, state="scheduled", due_at=1, queue=queue, wakes=False)
        messages: list[object] = []
        wait_until(lambda: messages.extend(received(app, queue)) or len(messages) == 2, what="both messages")  # noqa: B023
        with rows.database.transaction() as connection:
            connection.execute(text(DROP_OTHERS))
    stop.set()
    thread.join(40)
    assert not thread.is_alive()
    rows.close()


FREEZES = """
import os, signal, sys, time
from tests.integration.test_dispatcher_main import app_with
from celery_durable import crashpoints
from celery_durable.dispatcher import main
def freeze(point):
    if point == "passes.step.before_commit":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1)  # another thread may be the one that takes the signal: this one goes no further meanwhile
crashpoints.arm(freeze)
url, servers = sys.argv[1:]
sys.exit(main.run(app_with(database_url=url, kafka_bootstrap_servers=servers, kafka_session_timeout_ms=1_000)))
"""


@pytest.mark.processes
@pytest.mark.postgresql
def test_a_dispatcher_that_is_frozen_in_a_pass_holds_no_other_up(
    postgresql_url: str, mock_kafka: Kafka, tmp_path: Path
) -> None:
    """Rule 4's locks: PostgreSQL ends the transaction of a process that stands still, and both go on."""
    rows = Rows(postgresql_url)
    rows.add("op")
    command = [sys.executable, "-c", FREEZES, postgresql_url, mock_kafka.bootstrap_servers]
    process = Process("frozen", command, folder=tmp_path, env={})
    process.start()
    try:
        watched = psutil.Process(process.pid)
        wait_until(lambda: watched.status() == psutil.STATUS_STOPPED, what="the dispatcher to stand still")
        passes = rows.passes()
        deadline_s = STANDSTILL_MIN_MS / 1000 + 20
        wait_until(lambda: (passes.step(), rows.account())[1], deadline_s, what="the pass of another")
        process.thaw()
        wait_until(lambda: "passes: " in process.log_tail(100), what="its loop to begin again")
        assert process.terminate() == 0
    finally:
        process.kill()
        rows.close()


@pytest.mark.processes
def test_sigterm_ends_it(stack: Stack) -> None:
    """By itself, within the time that it has to shut down. (What it costs when idle is in tests/e2e/test_idle.py.)"""
    process = stack.service().dispatcher()
    wait_until(lambda: "started" in process.log_tail(100), what="the dispatcher")
    assert process.terminate() == 0
