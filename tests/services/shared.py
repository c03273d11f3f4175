"""Servers that the processes of one test run share, such as the workers of pytest-xdist.

A keeper process of its own runs the server. Every user holds a shared lock on a file for as long as it uses it; the
keeper waits for that lock exclusively, so it gets it, stops the server and ends when the last user is gone, whether
that one closed it or was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.services.process import ServiceUnavailable

_REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class SharedKafka:
    """A Kafka that other tests use at the same time: it cannot be killed; topics are told apart by their prefix."""

    bootstrap_servers: str
    kind: str

    @property
    def real(self) -> bool:
        """True for an Apache Kafka, False for the mock cluster."""
        return self.kind != "mock"


@contextmanager
def shared(name: str, folder: Path, deadline_s: float = 400) -> Iterator[dict[str, Any]]:
    """The description of the shared server ``name`` (postgresql, redis, rabbitmq, kafka, mock-kafka).

    :param folder: the test run's own folder, the same in every process that shares.
    :raises ServiceUnavailable: this machine cannot run it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.users").open("w") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        with (folder / f"{name}.start").open("w") as starting:
            fcntl.flock(starting, fcntl.LOCK_EX)
            description = _running(folder, name) or _start(folder, name, deadline_s)
        if "unavailable" in description:
            raise ServiceUnavailable(description["unavailable"])
        yield description


def _running(folder: Path, name: str) -> dict[str, Any] | None:
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    description: dict[str, Any] = json.loads(path.read_text())
    try:
        os.kill(description["keeper"], 0)
    except ProcessLookupError:
        path.unlink()
        return None
    return description


def _start(folder: Path, name: str, deadline_s: float) -> dict[str, Any]:
    log = folder / f"{name}.log"
    with log.open("ab") as output:
        done = subprocess.run(
            [sys.executable, "-m", "tests.services.shared", name, str(folder)],
            cwd=_REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            timeout=deadline_s,
            check=False,
        )
    description = _running(folder, name)
    if done.returncode != 0 or description is None:
        raise RuntimeError(f"{name} did not start:\n{log.read_text(errors='replace')[-4_000:]}")
    return description


def _serve(name: str, handles: contextlib.ExitStack) -> dict[str, Any]:
    from tests.services.kafka import MockKafka, start_kafka
    from tests.services.postgresql import PostgreSQL
    from tests.services.rabbitmq import RabbitMQ
    from tests.services.redis import Redis

    if name in ("kafka", "mock-kafka"):
        kafka = start_kafka() if name == "kafka" else MockKafka().start()
        handles.callback(kafka.stop)
        return {"bootstrap_servers": kafka.bootstrap_servers, "kind": kafka.kind}
    servers: dict[str, Callable[[], PostgreSQL | RabbitMQ | Redis]]
    servers = {"postgresql": PostgreSQL, "rabbitmq": RabbitMQ, "redis": Redis}
    server = servers[name]()
    handles.callback(server.stop)
    server.start()
    return {"url": server.url(), "port": server.port}


def _keep(name: str, folder: Path, ready: int) -> None:
    path = folder / f"{name}.json"
    with contextlib.ExitStack() as handles, (folder / f"{name}.users").open("a") as users:
        try:
            description = _serve(name, handles)
        except ServiceUnavailable as error:
            description = {"unavailable": str(error)}
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({**description, "keeper": os.getpid()}))
        partial.rename(path)
        os.write(ready, b"+")
        fcntl.flock(users, fcntl.LOCK_EX)
        path.unlink()


def _main(name: str, folder: Path) -> int:
    """Ends when the server answers, and leaves the keeper behind."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(reading)
        _keep(name, folder, writing)
        return 0
    os.close(writing)
    return 0 if os.read(reading, 1) == b"+" else 1


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], Path(sys.argv[2])))
