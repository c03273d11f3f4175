"""Redis from the machine's own ``redis-server``."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import redis

from tests.services.process import ServerProcess, ServiceUnavailable, free_port
from tests.services.server import LocalServer

DATABASES = 4_096
"""Numbered databases of a server: each test takes one of its own."""


class Redis(LocalServer):
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

    def flush(self) -> None:
        """Wipes every database."""
        with self.client() as client:
            client.flushall()

    def answers(self) -> bool:
        """Whether it answers a ping."""
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False
