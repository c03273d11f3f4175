"""A laptop: ``durable up`` with SQLite, the embedded Kafka and a folder as Celery's broker."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report.goals import OURS
from benchmarks.report.record import Figures
from benchmarks.scenario import Bench, Contender, Contenders, Scenario
from benchmarks.setting.child import Child
from benchmarks.setting.running import Running, end_to_end
from benchmarks.setting.tally import Tally
from benchmarks.systems.durable import MODULE
from benchmarks.systems.durable_app import tally_path
from tests.harness import Process

CALLS = 1_500


class _Laptop(Running):
    def __init__(self, app: dict[str, Any], database: Path, process: Process) -> None:
        super().__init__([Tally(tally_path(app["records"]))], [process])
        self._app = app
        self._database = database

    def send(self, count: int) -> list[Child]:
        return [Child("benchmarks.systems.durable_send:send", app=self._app, task="bench.noop", count=count)]

    def ended(self) -> int:
        with contextlib.closing(sqlite3.connect(self._database, timeout=10)) as connection:
            query = "SELECT count(*) FROM durable_operations WHERE state = 'succeeded'"
            found: int = connection.execute(query).fetchone()[0]
            return found


def _measure(count: int) -> Figures:
    with tempfile.TemporaryDirectory(prefix="celery-durable-bench-") as name:
        folder = Path(name)
        database = folder / "laptop.sqlite3"
        app = {
            "name": "laptop",
            "broker": {},
            "durable": {"client_id": "laptop", "database_url": f"sqlite:///{database}"},
            "records": str(folder / "records"),
        }
        words = ["durable", "up", "--data", str(folder / "data"), "--concurrency", "2"]
        env = {"EXAMPLE_APP": json.dumps(app)}
        with Process("up", [sys.executable, "-m", "celery", "-A", MODULE, *words], folder=folder, env=env) as process:
            process.until(lambda: " ready." in process.log_tail(200), 60)
            return end_to_end(_Laptop(app, database, process), count, warm_up=100)


@contextlib.contextmanager
def _contenders(bench: Bench) -> Iterator[Contenders]:
    settings = "`durable up`, default settings, worker prefork with 2 processes"
    yield {OURS: Contender(lambda: _measure(bench.count(CALLS)), settings)}


SCENARIOS = (
    Scenario(
        "embedded",
        "SQLite, the embedded Kafka, a folder as Celery's broker, no account: as end-to-end.",
        _contenders,
    ),
)
