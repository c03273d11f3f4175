"""Celery events for what no worker tells: an operation that waits, and one that ended without a worker.

Flower and other readers of Celery's events see a durable task from ``task-received`` on, as any task. Before that, and
when its worker died, the dispatcher speaks:

- ``task-sent`` (state PENDING, Celery's event of a client: it makes no worker) for an operation that waits, with its
  account, its group and the reason in the text of ``kwargs``, again whenever the reason changes;
- ``task-retried`` for an attempt whose worker was lost, ``task-failed`` where that was the last one or none ever ran,
  ``task-revoked`` for a cancelled or expired operation.

Every event but ``task-sent`` makes its sender a worker in the reader's list, and one that is alive. So these carry the
name of a real worker: the one that ran the attempt, declared offline again if it was lost (it reappears with its next
heartbeat, should it live); or, for an operation that none ran, one that runs something now, as Celery too has the
worker that drops a revoked message announce it. Until any worker is known they wait.

Best effort and from memory: it reads rows, writes none, and is off unless the app sets Celery's own
``task_send_sent_event``. While the broker is away it tries every 10 s and catches up afterwards.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, func, select

from celery_durable.crashpoints import crashpoint
from celery_durable.monitoring.reasons import NOTHING, Known, load_known, queued_reason
from celery_durable.runtime import Runtime, runtime_of
from celery_durable.scheduling.loop import Step
from celery_durable.store.clock import now_ms
from celery_durable.store.schema import CANCELLED, ENDED_STATES, FAILED, QUEUED, RUNNING, SCHEDULED, SUCCEEDED
from celery_durable.store.sql import in_states

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
BROKER_AWAY_S = 10.0
TRACKED_MAX = 10_000
"""Operations kept in view: as many as Flower itself keeps."""
BATCH = 500
OVERLAP = 200
"""Row numbers are not committed in their order: this many below the newest seen are looked at again."""


def make_step(app: Celery) -> Step:
    """The dispatcher's step that sends events; one that does nothing if the app does not send ``task-sent``."""
    if not app.conf.task_send_sent_event:
        return lambda: float("inf")
    return Events(app, runtime_of(app)).step


@dataclass(slots=True)
class _Seen:
    """What was last said about an operation. Empty text: nothing."""

    text: str
    worker_losses: int


@dataclass(frozen=True, slots=True)
class Event:
    """One event of Celery about one operation."""

    type: str
    fields: dict[str, Any]
    worker: str | None = None
    """Its sender; None: the client, which makes no worker."""
    lost: bool = False
    """The worker is gone."""


class Events:
    """Follows the operations that have not ended and says what changed. For one thread."""

    def __init__(self, app: Celery, runtime: Runtime) -> None:
        self._runtime = runtime
        self._sender = _Sender(app, f"durable@{runtime.settings.client_id}")
        self._tracked: OrderedDict[int, _Seen] = OrderedDict()
        self._newest: int | None = None
        self._worker: str | None = None

    def step(self) -> float | None:
        """Looks once. Never raises for the broker's sake."""
        with self._runtime.database.reading() as connection:
            new, again = self._new(connection), self._again(connection)
            rows = [row for row in new if row.order_no not in self._tracked] + again
            accounts = {row.account for row in rows if row.account is not None and row.state == QUEUED}
            known = load_known(connection, self._runtime.tables, accounts)
            self._worker = self._live_worker(connection) or self._worker
        try:
            for row in rows:
                self._tell(row, known.get(row.account, NOTHING))
        except Exception as error:  # noqa: BLE001 - whatever a transport raises: events are best effort
            logger.debug("events: the broker does not answer: %s", error)
            self._sender.close()
            return BROKER_AWAY_S
        return None if len(new) == BATCH + OVERLAP else LOOK_EVERY_S

    def _new(self, connection: Connection) -> list[Any]:
        order_no = self._runtime.tables.operations.c.order_no
        if self._newest is None:
            newest = connection.execute(select(func.max(order_no))).scalar_one() or 0
            # What is under way already is said again: a Flower that started since would not know of it otherwise.
            self._newest = max(0, newest - TRACKED_MAX)
        statement = self._select().where(order_no > self._newest - OVERLAP).order_by(order_no).limit(BATCH + OVERLAP)
        return list(connection.execute(statement))

    def _again(self, connection: Connection) -> list[Any]:
        numbers = list(islice(self._tracked, BATCH))
        if not numbers:
            return []
        rows = list(connection.execute(self._select().where(self._runtime.tables.operations.c.order_no.in_(numbers))))
        for number in set(numbers) - {row.order_no for row in rows}:
            del self._tracked[number]  # deleted by retention
        return rows

    def _live_worker(self, connection: Connection) -> str | None:
        operations = self._runtime.tables.operations
        statement = (
            select(operations.c.worker)
            .where(in_states(operations, (RUNNING,)), operations.c.alive_until > now_ms())
            .order_by(operations.c.alive_until.desc())
            .limit(1)
        )
        worker: str | None = connection.execute(statement).scalar_one_or_none()
        return worker

    def _select(self) -> Any:
        operations, payloads = self._runtime.tables.operations, self._runtime.tables.payloads
        return select(
            operations.c.order_no,
            operations.c.id,
            operations.c.task,
            operations.c.account,
            operations.c.group,
            operations.c.queue,
            operations.c.state,
            operations.c.retries,
            operations.c.worker,
            operations.c.worker_losses,
            operations.c.started_at,
            operations.c.expires_at,
            operations.c.ended_at,
            operations.c.error,
            payloads.c.headers,
        ).join_from(operations, payloads, operations.c.id == payloads.c.id)

    def _tell(self, row: Any, known: Known) -> None:
        seen = self._tracked.get(row.order_no)
        if seen is None and row.state in ENDED_STATES and row.order_no <= (self._newest or 0):
            return  # ended, and told, before
        seen = seen or _Seen("", 0)
        told = changes(row, known, seen.text, seen.worker_losses, self._worker)
        for event in told:
            self._sender.send(event)
        self._newest = max(self._newest or 0, row.order_no)
        if row.state in ENDED_STATES and not (_needs_telling(row, seen.worker_losses) and not told):
            self._tracked.pop(row.order_no, None)
            return
        self._tracked[row.order_no] = _Seen(waiting_text(row, known), row.worker_losses)
        self._tracked.move_to_end(row.order_no)
        while len(self._tracked) > TRACKED_MAX:
            self._tracked.popitem(last=False)


def waiting_text(row: Any, known: Known) -> str:
    """Why the operation waits; empty if it does not."""
    if row.state == SCHEDULED:
        return "waits: not due yet"
    return f"waits: {queued_reason(row.group, known)}" if row.state == QUEUED else ""


def changes(row: Any, known: Known, text: str, worker_losses: int, live_worker: str | None) -> list[Event]:
    """The events that bring a reader from what was said (``text``, ``worker_losses``) to what the row says now.

    :param live_worker: a worker that may speak for an operation that none ran; without one nothing is said of that.
    """
    lost = row.worker_losses > worker_losses
    worker = row.worker or live_worker
    told = []
    if worker is not None and _needs_telling(row, worker_losses):
        told.append(Event(*_outcome(row), worker, lost and row.worker is not None))
    now = waiting_text(row, known)
    if now and now != text:
        told.append(Event("task-sent", {**_names(row), **_call(row, now)}))
    return told


def _needs_telling(row: Any, worker_losses: int) -> bool:
    """Whether the row shows what no worker has told."""
    lost = row.worker_losses > worker_losses
    if row.state == FAILED:
        return bool(lost or row.started_at is None)
    return bool(row.state == CANCELLED or (lost and row.state not in (RUNNING, SUCCEEDED)))


def _outcome(row: Any) -> tuple[str, dict[str, Any]]:
    if row.state == CANCELLED:
        expired = row.expires_at is not None and row.ended_at is not None and row.expires_at <= row.ended_at
        return "task-revoked", {**_names(row), "terminated": False, "signum": None, "expired": expired}
    error = row.error or "failed before any worker ran it"
    if row.state == FAILED:
        return "task-failed", {**_names(row), "exception": error, "traceback": error}
    return "task-retried", {**_names(row), "exception": "its worker was lost", "traceback": ""}


def _names(row: Any) -> dict[str, Any]:
    return {"uuid": row.id, "name": row.task}


def _call(row: Any, text: str) -> dict[str, Any]:
    headers = row.headers or {}
    where = [f"account={row.account!r}"] if row.account is not None else []
    where += [f"group={row.group!r}"] if row.group else []
    return {
        "args": headers.get("argsrepr") or "()",
        "kwargs": " ".join([headers.get("kwargsrepr") or "{}", "|", *where, text]),
        "retries": row.retries,
        "root_id": headers.get("root_id"),
        "parent_id": headers.get("parent_id"),
        "eta": None,
        "expires": None,
        "queue": row.queue,
    }


class _Sender:
    """Publishes events through one held connection."""

    def __init__(self, app: Celery, client: str) -> None:
        self._app = app
        self._client = client
        self._connection: Any = None
        self._dispatcher: Any = None

    def send(self, event: Event) -> None:
        """Sends the event, and for a lost worker its end. Raises what the transport raises."""
        self._publish(event)
        if event.lost:
            self._publish(Event("worker-offline", {}, event.worker))

    def close(self) -> None:
        """Drops the connection."""
        connection, self._connection, self._dispatcher = self._connection, None, None
        if connection is not None:
            with suppress(Exception):
                connection.collect(socket_timeout=0.5)

    def _publish(self, event: Event) -> None:
        if self._dispatcher is None:
            self._connection = self._app.connection_for_write()
            self._connection.connect()
            self._dispatcher = self._app.events.Dispatcher(self._connection, buffer_while_offline=False)
        self._dispatcher.hostname = event.worker or self._client
        crashpoint("events.message", "before_publish")
        self._dispatcher.send(event.type, retry=False, **event.fields)
        crashpoint("events.message", "after_publish")
