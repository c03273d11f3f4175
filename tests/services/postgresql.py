"""PostgreSQL from the machine's own binaries: one cluster, and as many databases as tests ask for."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import psycopg

from tests.services.process import ServerProcess, ServiceUnavailable, free_port, guarded
from tests.services.server import LocalServer

_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "300",
    "fsync": "on",
    "full_page_writes": "on",
    "log_min_messages": "warning",
    "timezone": "UTC",
}


class PostgreSQL(LocalServer):
    """A cluster with durable commits; it survives :meth:`kill` as it would a power cut.

    :raises ServiceUnavailable: no PostgreSQL server is installed.
    """

    START_S = 60
    STOP = (signal.SIGINT, 30)
    """A fast shutdown."""

    def __init__(self, settings: dict[str, str] | None = None) -> None:
        self.port = free_port()
        self._settings = {**_SETTINGS, **(settings or {})}
        self._user = "postgres" if os.geteuid() == 0 else None
        self._binaries = _find_binaries()
        guarded(self._user)
        self._folder = Path(tempfile.mkdtemp(prefix="celery-durable-postgresql-"))
        self._data = self._folder / "data"
        options = [word for name, value in self._settings.items() for word in ("-c", f"{name}={value}")]
        self._process = ServerProcess(
            [str(self._binaries / "postgres"), "-D", str(self._data), "-p", str(self.port), *options],
            log=self._folder / "server.log",
            cwd=self._folder,
            user=self._user,
        )

    @property
    def pid(self) -> int:
        """The postmaster's process ID."""
        return self._process.pid

    def url(self, database: str = "postgres") -> str:
        """The SQLAlchemy URL of a database."""
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/{database}"

    def start(self) -> Self:
        if not self._data.exists():
            self._initialise()
        return super().start()

    def kill(self) -> None:
        super().kill()
        (self._data / "postmaster.pid").unlink(missing_ok=True)

    def cut_off(self) -> None:
        """An immediate shutdown: every session is cut off, and the next start recovers from the log."""
        self._process.stop(signal.SIGQUIT, 30)

    @contextmanager
    def new_database(self) -> Iterator[str]:
        """A fresh database's URL; the database is dropped at the end."""
        with fresh_database(self.url()) as url:
            yield url

    def _initialise(self) -> None:
        if self._user is not None:
            shutil.chown(self._folder, self._user, self._user)
        command = [str(self._binaries / "initdb"), "-D", str(self._data), "-U", "postgres", "-A", "trust"]
        command += ["-E", "UTF8", "--locale=C", "--no-sync"]
        if self._user is not None:
            command = ["setpriv", f"--reuid={self._user}", f"--regid={self._user}", "--init-groups", "--", *command]
        done = subprocess.run(command, cwd=self._folder, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"initdb as {self._user or getpass.getuser()} failed:\n{done.stdout}{done.stderr}")

    def answers(self) -> bool:
        """Whether a session can be opened."""
        try:
            psycopg.connect(host="127.0.0.1", port=self.port, user="postgres", dbname="postgres").close()
        except psycopg.OperationalError:
            return False
        return True


@contextmanager
def fresh_database(server_url: str) -> Iterator[str]:
    """A new database beside the one of ``server_url``; yields its SQLAlchemy URL and drops it at the end."""
    base, _, _ = server_url.rpartition("/")
    plain = server_url.replace("+psycopg", "")
    name = f"t_{uuid.uuid4().hex[:16]}"
    with psycopg.connect(plain, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    try:
        yield f"{base}/{name}"
    finally:
        with psycopg.connect(plain, autocommit=True) as connection:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


def _find_binaries() -> Path:
    on_path = shutil.which("initdb")
    if on_path and shutil.which("postgres"):
        return Path(on_path).parent
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: float(path.parts[-3]))
    if installed:
        return installed[-1].parent
    raise ServiceUnavailable("PostgreSQL: no initdb on PATH or in /usr/lib/postgresql; apt-get install postgresql")
