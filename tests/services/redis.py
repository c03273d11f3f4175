"""Redis from the machine's own ``redis-server``."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Self

import redis

from tests.services.process import ServerProcess, ServiceUnavailable, free_port

DATABASES = 4_096
"""Numbered databases of a server: each test takes one of its own."""


class Redis:
    """A server that keeps its data over a restart (append-only file, synced each second).

    :raises ServiceUnavailable: ``redis-server`` is not installed.
    """

    def __init__(self) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            raise ServiceUnavailable("Redis: no redis-server on PATH; apt-get install redis-server")
        self.port = free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="celery-durable-redis-"))
        options = {"port": self.port, "bind": "127.0.0.1", "dir": self._folder, "databases": DATABASES}
        options |= {"appendonly": "yes", "save": "", "loglevel": "warning"}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        self._process = ServerProcess([binary, *words], log=self._folder / "server.log", cwd=self._folder)

    def url(self, database: int = 0) -> str:
        """The URL of a numbered database."""
        return f"redis://127.0.0.1:{self.port}/{database}"

    def client(self, database: int = 0) -> redis.Redis:
        """A new connection, for the test itself; close it."""
        return redis.Redis(port=self.port, db=database)

    def start(self) -> Self:
        """Starts the server and waits until it answers."""
        self._process.start()
        self._process.until(self._answers, 30)
        return self

    def kill(self) -> None:
        """Ends the server with SIGKILL."""
        self._process.kill()

    def restart(self, *, kill: bool = True) -> None:
        """Ends the server, by SIGKILL or in order, and starts it again on its data."""
        if kill:
            self.kill()
        else:
            self._process.stop()
        self.start()

    def flush(self) -> None:
        """Wipes every database."""
        with self.client() as client:
            client.flushall()

    def stop(self) -> None:
        """Ends the server and removes its data."""
        self._process.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False
