"""Plain Celery with a Redis broker, running."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis

from benchmarks.setting.child import Child, Failed
from benchmarks.setting.running import Running, call_together
from benchmarks.setting.servers import Servers
from benchmarks.setting.tally import Tally
from benchmarks.systems.celery_app import VARIABLE
from tests.harness import Process

WORKER = ("worker", "--pool", "prefork", "--loglevel", "WARNING", "--without-mingle", "--without-gossip")
STORE = "Redis broker (append-only file, synced each second)"
SETTINGS = "Redis broker (append-only file, synced each second), prefork with 2 processes, prefetch multiplier 64"


class PlainCelery(Running):
    """A worker on Redis."""

    def __init__(self, settings: dict[str, Any], worker: Process) -> None:
        super().__init__([Tally(Path(settings["tally"]))], [worker])
        self.settings = settings
        self._broker = redis.Redis.from_url(settings["broker"])
        self._results = redis.Redis.from_url(settings["results"]) if settings["results"] else None

    def send(self, count: int) -> list[Child]:
        return call_together("benchmarks.systems.celery_app:send", count, **self.settings)

    def ended(self) -> int:
        """With results: how many there are. Without, Celery records nothing: the bodies, once the broker is empty."""
        if self._results is not None:
            return int(self._results.dbsize())
        under_way = self._broker.llen("celery") + self._broker.hlen("unacked")
        return 0 if under_way else self.bodies

    def close(self) -> None:
        """:raises Failed: a result is no success."""
        if self._results is not None:
            for key in self._results.scan_iter(count=1_000):
                state = json.loads(self._results.get(key) or b"{}").get("status")
                if state != "SUCCESS":
                    raise Failed(f"plain Celery: {key!r} is {state}")
            self._results.close()
        self._broker.close()


@contextlib.contextmanager
def store(servers: Servers, *, results: bool, acks_late: bool = False) -> Iterator[dict[str, Any]]:
    """The app's settings, with an empty broker and, for results, an empty database; both are wiped at the end."""
    with tempfile.TemporaryDirectory(prefix="celery-durable-bench-") as folder:
        settings: dict[str, Any] = {
            "broker": servers.new_redis(),
            "results": servers.new_redis() if results else None,
            "acks_late": acks_late,
            "tally": f"{folder}/tally",
        }
        try:
            yield settings
        finally:
            for url in filter(None, (settings["broker"], settings["results"])):
                with redis.Redis.from_url(url) as client:
                    client.flushdb()


@contextlib.contextmanager
def running(servers: Servers, *, results: bool, acks_late: bool = False) -> Iterator[PlainCelery]:
    """A worker with a broker, and a result database, of its own."""
    with store(servers, results=results, acks_late=acks_late) as settings:
        command = [sys.executable, "-m", "celery", "-A", "benchmarks.systems.celery_app", *WORKER, "--concurrency", "2"]
        folder = Path(settings["tally"]).parent
        with Process("celery", command, folder=folder, env={VARIABLE: json.dumps(settings)}) as worker:
            system = PlainCelery(settings, worker)
            yield system
        system.close()
