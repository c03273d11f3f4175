"""The API that is called, and the witness: it counts calls in flight by itself, from what reaches it over HTTP.

It knows nothing of permits. A call that a killed worker left behind goes on here until it is done; when the next
attempt of the same operation calls with another run token, the older call is no longer counted as in flight, and is
remembered as left behind.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Bucket = tuple[str, str | None]
"""(tenant, None): the whole tenant. (tenant, workflow): one workflow of it."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call in flight."""

    tenant: str
    workflow: str | None
    key: str
    token: str

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """What it counts in."""
        whole = (self.tenant, None)
        return (whole, (self.tenant, self.workflow)) if self.workflow else (whole,)


class Witness:
    """Counts calls in flight and side effects. Safe to use from many threads."""

    def __init__(self, flaky: Collection[str] = ()) -> None:
        self._lock = threading.Lock()
        self._flaky = set(flaky)
        self._calls: dict[str, Call] = {}
        self._now: Counter[Bucket] = Counter()
        self._most: Counter[Bucket] = Counter()
        self.runs: dict[str, list[str]] = {}
        """The run tokens that called under each idempotency key, in order."""
        self.effects: Counter[str] = Counter()
        """Side effects under each idempotency key."""
        self.replays = 0
        """Calls whose side effect was there already."""
        self.left_behind: list[Call] = []

    def now(self, tenant: str, workflow: str | None = None) -> int:
        """Calls in flight."""
        return self._now[(tenant, workflow)]

    def most(self, tenant: str, workflow: str | None = None) -> int:
        """The most that were ever in flight at one instant."""
        return self._most[(tenant, workflow)]

    def keys_in_flight(self) -> list[str]:
        """The idempotency keys of the calls in flight."""
        with self._lock:
            return list(self._calls)

    def enter(self, call: Call) -> bool:
        """A call arrives. False: it is to be refused as unavailable, this once."""
        with self._lock:
            self.runs.setdefault(call.key, []).append(call.token)
            older = self._calls.pop(call.key, None)
            if older is not None:
                self.left_behind.append(older)
                self._now.subtract(older.buckets)
            self._calls[call.key] = call
            self._now.update(call.buckets)
            for bucket in call.buckets:
                self._most[bucket] = max(self._most[bucket], self._now[bucket])
            if call.key in self._flaky:
                self._flaky.discard(call.key)
                return False
            return True

    def perform(self, call: Call) -> bool:
        """Does the side effect unless it is done. False: it was."""
        with self._lock:
            if self.effects[call.key]:
                self.replays += 1
                return False
            self.effects[call.key] += 1
            return True

    def leave(self, call: Call) -> None:
        """The call is over."""
        with self._lock:
            if self._calls.get(call.key) == call:
                del self._calls[call.key]
                self._now.subtract(call.buckets)


class _Handler(BaseHTTPRequestHandler):
    """``POST /tenants/<tenant>/calls`` with ``{"ms": …, "workflow": …}``."""

    witness: Witness

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        call = Call(
            tenant=self.path.split("/")[2],
            workflow=body["workflow"],
            key=self.headers["Idempotency-Key"],
            token=self.headers["X-Run-Token"],
        )
        try:
            accepted = self.witness.enter(call)
            time.sleep(body["ms"] / 1000)
            done = accepted and self.witness.perform(call)
        finally:
            # Before the answer: the caller may make its next call as soon as it has it.
            self.witness.leave(call)
        self._answer(200 if accepted else 503, {"key": call.key, "done": done})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except ConnectionError:
            pass  # the caller was killed

    def log_message(self, format: str, *args: Any) -> None:
        """Keeps the terminal for the table."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


@contextmanager
def serve(witness: Witness) -> Iterator[str]:
    """Serves the API on a free port of loopback while the context lasts; gives its address."""
    handler = type("Handler", (_Handler,), {"witness": witness})
    with _Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.1,), name="api", daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
