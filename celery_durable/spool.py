"""A Celery broker that is a folder: no server, works between processes of one host, for a laptop and the demo.

``durable-spool:////absolute/folder`` (four slashes, as in SQLite's URLs). It is kombu's filesystem transport with its
writes made atomic: kombu's own creates a message file first and fills it afterwards, so a consumer that polls in
between loses the message and ends with a JSON error (seen with messages of 200 kB). ``docs/architecture.md`` has the
comparison with kombu's SQLAlchemy transport. Like every broker here it may forget everything (rule 8).
"""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from queue import Empty
from typing import Any
from urllib.parse import quote

from kombu.transport import TRANSPORT_ALIASES, filesystem
from kombu.utils.json import dumps, loads

SCHEME = "durable-spool"
POLL_S = 0.05
"""Pause between looks at an empty folder: 28 ms latency at the median, 0.8 % of a core for an idle worker."""


def url(folder: Path) -> str:
    """The broker URL of ``folder``."""
    return f"{SCHEME}:///{folder.resolve()}"


def register() -> None:
    """Makes the scheme known to kombu in this process. Cheap; may be called again."""
    TRANSPORT_ALIASES.setdefault(SCHEME, f"{__name__}:Transport")


class Channel(filesystem.Channel):
    """One file a message, complete from the moment it can be seen; whoever renames it away has it."""

    @cached_property
    def folder(self) -> Path:
        """The broker's folder, from the URL."""
        folder = Path(self.connection.client.hostname.removeprefix(f"{SCHEME}:///"))
        for part in ("queues", "partial", "taken", "control"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def control_folder(self) -> Path:
        """Where the bindings of each exchange are."""
        return self.folder / "control"

    def _queue(self, queue: str) -> Path:
        # Dots too: "." and ".." are no queue's folder.
        return self.folder / "queues" / quote(queue, safe="").replace(".", "%2E")

    def _put(self, queue: str, payload: Any, **_: Any) -> None:  # type: ignore[override]
        path = self._queue(queue)
        path.mkdir(exist_ok=True)
        self._replace(path / f"{time.time_ns():020d}-{uuid.uuid4().hex}", payload)

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:  # noqa: ARG002 - never waits
        for name in self._names(queue):
            taken = self.folder / "taken" / name
            try:
                (self._queue(queue) / name).rename(taken)
            except FileNotFoundError:
                continue  # another consumer was faster
            payload: dict[str, Any] = loads(taken.read_text())
            taken.unlink()
            return payload
        raise Empty

    def _size(self, queue: str) -> int:
        return len(self._names(queue))

    def _purge(self, queue: str) -> int:
        names = self._names(queue)
        for name in names:
            (self._queue(queue) / name).unlink(missing_ok=True)
        return len(names)

    def _names(self, queue: str) -> list[str]:
        try:
            return sorted(os.listdir(self._queue(queue)))
        except FileNotFoundError:
            return []

    def _replace(self, path: Path, content: Any) -> None:
        partial = self.folder / "partial" / uuid.uuid4().hex
        partial.write_text(dumps(content))
        partial.replace(path)

    def _queue_bind(self, exchange: str, routing_key: str | None, pattern: str | None, queue: str | None) -> None:
        binding = filesystem.exchange_queue_t(routing_key or "", pattern or "", queue or "")
        self._change_table(exchange, lambda table: table if binding in table else [binding, *table])

    def _delete(self, queue: str, exchange: str, routing_key: str, pattern: str, *_: Any, **__: Any) -> None:
        self._purge(queue)
        binding = filesystem.exchange_queue_t(routing_key or "", pattern or "", queue or "")
        self._change_table(exchange, lambda table: [row for row in table if row != binding])

    def _change_table(self, exchange: str, change: Callable[[list[Any]], list[Any]]) -> None:
        file = self._exchange_file(exchange)  # type: ignore[no-untyped-call]
        with self._locked():
            table = self.get_table(exchange)  # type: ignore[no-untyped-call]
            changed = change(table)
            if changed != table:
                self._replace(file, changed)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


class Transport(filesystem.Transport):
    """The transport of ``durable-spool:`` URLs."""

    Channel = Channel
    can_parse_url = True  # kombu hands the whole URL over as the host name
    polling_interval = POLL_S
    driver_name = SCHEME
