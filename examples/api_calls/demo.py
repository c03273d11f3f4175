"""The stage: starts Kafka, the API, a holder and two services, enqueues the jobs, breaks things, and judges."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

import celery_durable
from celery_durable import limits
from celery_durable.kafka.embedded import EmbeddedBroker
from celery_durable.runtime import runtime_of
from celery_durable.store import outbox
from celery_durable.store.migrate import migrate
from celery_durable.supervisor import Supervisor
from examples.api_calls import progress
from examples.api_calls.api import Witness, serve
from examples.api_calls.jobs import SERVICES, WORKFLOW_LIMITS, Job
from examples.api_calls.screen import Screen, screen_for, table
from examples.api_calls.verdict import Check, judge

WORKER_THREADS = 10
LOOK_EVERY_S = 0.1
KILL_AT, RESTART_AT = 0.3, 0.6
"""Shares of the jobs that are done when a worker is killed, and when the holder is restarted."""
SETTLED_WITHIN_S = 20.0
"""The holder's view follows the services' by a report, which an unused lease sends after ``idle_return_s``."""
VICTIM = "billing"


class Demo:
    """One run.

    :param limit_s: how long it may take once everything has started.
    :param faults: whether a worker is killed and the holder restarted.
    """

    def __init__(self, jobs: Sequence[Job], console: Console, *, limit_s: float, faults: bool = True) -> None:
        self._jobs = jobs
        self._console = console
        self._limit_s = limit_s
        self._faults = faults
        self._witness = Witness(flaky=[job.id for job in jobs if job.flaky])
        self._apps: dict[str, Any] = {}

    def run(self) -> int:
        """Runs it and returns the exit code: 0 only if every check holds."""
        folder = Path(tempfile.mkdtemp(prefix="celery-durable-demo-"))
        try:
            return self._run(folder)
        except KeyboardInterrupt:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _run(self, folder: Path) -> int:
        log = (folder / "log.txt").open("w", buffering=1)
        with ExitStack() as stack:
            stack.enter_context(log)
            os.environ["DEMO_FOLDER"] = str(folder)
            os.environ["DEMO_API"] = stack.enter_context(serve(self._witness))
            kafka = stack.enter_context(EmbeddedBroker()).bootstrap_servers
            for prefix in ("CELERY_DURABLE_", "HOLDER_"):
                os.environ[f"{prefix}KAFKA_BOOTSTRAP_SERVERS"] = kafka
                os.environ[f"{prefix}KAFKA_FETCH_WAIT_MAX_MS"] = "5"
            os.environ["HOLDER_DATABASE_URL"] = f"sqlite:///{folder / 'holder.sqlite3'}"
            supervisor = stack.enter_context(Supervisor(lambda name, line: _write(log, f"{name:<18}| {line}")))
            screen = stack.enter_context(screen_for(self._console))
            self._start(supervisor, screen)
            self._enqueue(screen)
            in_time = self._watch(supervisor, screen)
            screen.say("all calls have ended; the holder hears of it" if in_time else "stopped waiting")
            held = self._held_at_holder()
        checks = judge(self._jobs, self._apps, self._witness, held)
        checks.append(Check(in_time, f"it ended within {self._limit_s:.0f} s"))
        code = self._tell(checks)
        for app in self._apps.values():
            runtime_of(app).database.dispose()
        if code == 0:
            shutil.rmtree(folder)
        else:
            self._console.print(f"The processes' log and the databases are in {folder}", soft_wrap=True)
        return code

    def _start(self, supervisor: Supervisor, screen: Screen) -> None:
        screen.say(
            "starting: Kafka (embedded), the API, a holder, and two services with a worker and a dispatcher each"
        )
        self._apps = {name: import_module(f"examples.api_calls.{name}").app for name in SERVICES}
        for app in self._apps.values():
            migrate(runtime_of(app).database, runtime_of(app).tables)
        holder = [sys.executable, "-m", "holder_service.cli"]
        if supervisor.run([*holder, "migrate"], name="holder") != 0:
            raise SystemExit("holder-service migrate failed")
        supervisor.start("holder", [*holder, "run"])
        for name in SERVICES:
            supervisor.start(f"{name} dispatcher", [*_celery(name), "durable", "dispatcher"])
            worker = ["worker", "--pool", "threads", "--concurrency", str(WORKER_THREADS), "-n", f"{name}@%h"]
            supervisor.start(f"{name} worker", [*_celery(name), *worker, "--loglevel", "INFO"])

    def _enqueue(self, screen: Screen) -> None:
        self._limit_workflows()
        for name, app in self._apps.items():
            mine = [job for job in self._jobs if job.service == name]
            task = app.tasks[f"{name}.call_api"]
            # One transaction of the service's own: all of its jobs, or none.
            with runtime_of(app).database.transaction() as connection, celery_durable.using(connection):
                for job in mine:
                    task.apply_async((job.tenant, job.ms, job.workflow), task_id=job.id, group=job.workflow)
            screen.say(f"{name} enqueued {len(mine)} calls")

    def _limit_workflows(self) -> None:
        """Sets the workflows' own limits by command, and waits until Kafka has them: before any service's demand."""
        app = self._apps[VICTIM]
        for (tenant, workflow), limit in WORKFLOW_LIMITS.items():
            limits.set(f"tenant:{tenant}", limit, group=workflow, by="demo", app=app)
        runtime = runtime_of(app)
        deadline = time.monotonic() + self._limit_s
        while time.monotonic() < deadline:
            with runtime.database.reading() as connection:
                if outbox.depth(connection, runtime.tables.outbox)[0] == 0:
                    return
            time.sleep(LOOK_EVERY_S)
        raise SystemExit("the command did not reach Kafka")

    def _watch(self, supervisor: Supervisor, screen: Screen) -> bool:
        """Shows the progress until every job has ended; False if that took too long."""
        deadline = time.monotonic() + self._limit_s
        faults = self._planned_faults(supervisor, screen) if self._faults else []
        while time.monotonic() < deadline:
            now = progress.read(self._apps)
            screen.show(now, self._witness, len(self._jobs))
            if now.ended >= len(self._jobs):
                return not faults
            if faults and now.ended >= faults[0][0] * len(self._jobs) and faults[0][1]():
                faults.pop(0)
            if (code := supervisor.check()) is not None:
                screen.say(f"a process cannot start: exit code {code}")
                return False
            time.sleep(LOOK_EVERY_S)
        return False

    def _planned_faults(self, supervisor: Supervisor, screen: Screen) -> list[tuple[float, Callable[[], bool]]]:
        victims = {job.id for job in self._jobs if job.service == VICTIM}

        def kill_worker() -> bool:
            in_flight = victims.intersection(self._witness.keys_in_flight())
            if not in_flight:
                return False
            supervisor.kill(f"{VICTIM} worker")
            screen.say(f"killed the worker of {VICTIM} with SIGKILL; {len(in_flight)} of its calls were in flight")
            return True

        def restart_holder() -> bool:
            supervisor.terminate("holder")
            screen.say("restarted the holder")
            return True

        return [(KILL_AT, kill_worker), (RESTART_AT, restart_holder)]

    def _held_at_holder(self) -> int:
        """What the holder counts as in use, once its view has settled; -1 if it cannot be asked."""
        command = [sys.executable, "-m", "holder_service.cli", "accounts", "--json"]
        deadline = time.monotonic() + SETTLED_WITHIN_S
        while True:
            answer = subprocess.run(command, capture_output=True, text=True, check=False)
            held = sum(account["in_use"] for account in json.loads(answer.stdout)) if answer.returncode == 0 else -1
            if held == 0 or time.monotonic() >= deadline:
                return held
            time.sleep(0.5)

    def _tell(self, checks: Sequence[Check]) -> int:
        self._console.print()
        self._console.print(table(progress.read(self._apps), self._witness, "The end"))
        for check in checks:
            self._console.print("[green]✓[/]" if check.holds else "[bold red]✗[/]", check.text, soft_wrap=True)
        return 0 if all(check.holds for check in checks) else 1


def _write(log: TextIO, line: str) -> None:
    # A second Ctrl-C closes it while the children's last lines are still read.
    if not log.closed:
        print(line, file=log)


def _celery(service: str) -> list[str]:
    return [sys.executable, "-m", "celery", "-A", f"examples.api_calls.{service}"]
