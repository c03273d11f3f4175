"""Celery events for what no worker announces: an operation that waits, and one that ended without a worker.

Flower and other readers of Celery's events see a durable task from ``task-received`` on, as any task. Before that, and
when its worker died, the dispatcher speaks:

- ``task-sent`` (state PENDING, Celery's event of a client: it makes no worker) for an operation that waits, with its
  account, its group and the reason in the text of ``kwargs``, again whenever the reason changes;
- ``task-retried`` for an attempt whose worker was lost, ``task-failed`` where that was the last one or none ever ran,
  ``task-revoked`` for a cancelled or expired operation;
- the end of an operation whose worker was killed between the settle and its own event (:mod:`.unproven`).

Every event but ``task-sent`` makes its sender a worker in the reader's list, and one that is alive. So these carry the
name of a real worker: one that runs something or answers a ping, as Celery too has the worker that drops a revoked
message announce it; or the one that ran the attempt, declared offline again (it reappears with its next heartbeat,
should it live). While no worker was ever there only the text says how the operation ended.

Best effort and from memory, all of it bounded: it reads rows, writes none, and is off unless the app sets Celery's own
``task_send_sent_event``. While the broker is away it tries every 10 s and catches up afterwards.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from sqlalchemy import Connection

from celery_durable.monitoring import event_words as words
from celery_durable.monitoring.event_broker import EventBroker
from celery_durable.monitoring.event_rows import EventRows, Position
from celery_durable.monitoring.reasons import NOTHING, Known, load_known
from celery_durable.monitoring.unproven import FLUSH_MS, Life, Unproven
from celery_durable.runtime import Runtime, runtime_of
from celery_durable.scheduling.loop import Step
from celery_durable.store.schema import ENDED_STATES, QUEUED, RUNNING

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
ASK_EVERY_S = 10.0
"""How often workers are asked anything, at most."""
BROKER_AWAY_S = 10.0
CATCH_UP_MS = 60_000
"""Ends that are older are not announced: when a dispatcher starts, or after a broker that was away."""
TRACKED_MAX = 10_000
"""Operations kept in view: as many as Flower itself keeps."""
BATCH = 500
OVERLAP = 200
"""Row numbers are not committed in their order: this many below the newest seen are looked at again."""


def make_step(app: Celery) -> Step:
    """The dispatcher's step that sends events; one that does nothing if the app does not send ``task-sent``."""
    if not app.conf.task_send_sent_event:
        return lambda: float("inf")
    runtime = runtime_of(app)
    broker = EventBroker(app, f"durable@{runtime.settings.client_id}")
    return Events(runtime, broker, asks=bool(app.conf.worker_enable_remote_control)).step


class Broker(Protocol):
    """What :class:`~celery_durable.monitoring.event_broker.EventBroker` does."""

    def send(self, event: words.Event) -> None: ...

    def lives(self, workers: Sequence[str]) -> Mapping[str, Life]: ...

    def any_worker(self) -> str | None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Seen:
    """What was last said about an operation. Empty text: nothing."""

    text: str
    worker_losses: int


@dataclass(slots=True)
class _End:
    """An end to announce. ``gone``: its worker does not live; ``hinted``: the text says it, for want of a worker."""

    row: Any
    gone: bool = False
    hinted: bool = False


class Events:
    """Follows the operations and says what changed. For one thread.

    :param asks: the workers answer remote control.
    """

    def __init__(self, runtime: Runtime, broker: Broker, *, asks: bool) -> None:
        self._runtime = runtime
        self._rows = EventRows(runtime.tables)
        self._broker = broker
        self._asks = asks
        self._tracked: OrderedDict[int, _Seen] = OrderedDict()
        self._newest: int | None = None
        self._positions: dict[int | None, Position] = {}
        self._ended: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._retried: OrderedDict[int, None] = OrderedDict()
        self._unannounced: OrderedDict[int, _End] = OrderedDict()
        self._without_worker: OrderedDict[int, _End] = OrderedDict()
        self._unproven = Unproven(TRACKED_MAX)
        self._answered = False
        self._worker: str | None = None
        self._worker_until = 0.0
        self._ask_at = 0.0

    def step(self) -> float | None:
        """Looks once. Never raises for the broker's sake."""
        with self._runtime.database.reading() as connection:
            now = self._rows.now(connection)
            new, again = self._new(connection), self._again(connection)
            ends = self._rows.ended(connection, self._positions, now - CATCH_UP_MS, BATCH)
            rows = [row for row in new if row.order_no not in self._tracked and row.state not in ENDED_STATES]
            rows += [row for row in again if row.state not in ENDED_STATES]
            accounts = {row.account for row in rows if row.account is not None and row.state == QUEUED}
            known = load_known(connection, self._runtime.tables, accounts)
            self._meet(self._rows.any_busy(connection))
        for row in (*ends, *(row for row in again if row.state in ENDED_STATES)):
            self._note_end(row)
        try:
            for row in rows:
                self._say(row, known.get(row.account, NOTHING))
            if new:
                self._newest = max(self._newest or 0, new[-1].order_no)
            self._ask(now)
            self._announce_ends(now)
        except Exception as error:  # noqa: BLE001 - whatever a transport raises: events are best effort
            logger.debug("events: the broker does not answer: %s", error)
            self._broker.close()
            return BROKER_AWAY_S
        return None if len(new) == BATCH + OVERLAP or len(ends) >= BATCH else LOOK_EVERY_S

    def _new(self, connection: Connection) -> list[Any]:
        if self._newest is None:
            # What is under way already is said again: a Flower that started since would not know of it otherwise.
            self._newest = max(0, self._rows.newest(connection) - TRACKED_MAX)
        return self._rows.after(connection, self._newest - OVERLAP, BATCH + OVERLAP)

    def _again(self, connection: Connection) -> list[Any]:
        numbers = list(islice(self._tracked, BATCH))
        rows = self._rows.known(connection, numbers)
        for number in set(numbers) - {row.order_no for row in rows}:
            del self._tracked[number]  # deleted by retention
        return rows

    def _say(self, row: Any, known: Known) -> None:
        """Says what has changed of an operation that has not ended."""
        seen = self._tracked.get(row.order_no) or _Seen("", 0)
        text = words.waiting_text(row, known)
        if row.worker_losses > seen.worker_losses and row.state != RUNNING and row.worker is not None:
            self._broker.send(words.retried(row))
            _remember(self._retried, row.order_no)
        if text and text != seen.text:
            self._broker.send(words.waits(row, text))
        self._tracked[row.order_no] = _Seen(text, row.worker_losses)
        self._tracked.move_to_end(row.order_no)
        while len(self._tracked) > TRACKED_MAX:
            self._tracked.popitem(last=False)

    def _note_end(self, row: Any) -> None:
        self._tracked.pop(row.order_no, None)
        end = (row.order_no, row.ended_at)
        if end in self._ended:
            return
        _remember(self._ended, end)
        if not words.by_worker(row) or row.order_no in self._retried:
            # A task-retried of ours that was late would stand in Flower for ever: it takes the place of any state.
            self._is_unannounced(row, gone=bool(row.lost))
        elif self._asks:
            self._unproven.add(row)

    def _is_unannounced(self, row: Any, *, gone: bool) -> None:
        self._without_worker.pop(row.order_no, None)
        _keep(self._unannounced, row.order_no, _End(row, gone))

    def _ask(self, now: int) -> None:
        """Asks workers what rows do not tell: whether those with ends of late live, and who might speak."""
        if not self._asks or time.monotonic() < self._ask_at:
            return
        self._ask_at = time.monotonic() + ASK_EVERY_S
        workers = self._unproven.workers(now)
        if workers:
            lives = self._broker.lives(sorted(workers))
            silent = workers - lives.keys()
            self._answered = self._answered or bool(lives) or self._broker.any_worker() is not None
            # While no worker ever has answered it may be that none can: then nothing can be told from that.
            for end in self._unproven.judge(now, lives, self._busy(silent) if self._answered else silent):
                self._is_unannounced(end.row, gone=end.gone)
        if self._worker is None and (self._unannounced or self._without_worker):
            self._meet(self._broker.any_worker())

    def _meet(self, worker: str | None) -> None:
        """Remembers a worker that lives, for a while: one that was killed must not seem alive again."""
        if worker is not None:
            self._worker, self._worker_until = worker, time.monotonic() + ASK_EVERY_S
        elif time.monotonic() >= self._worker_until:
            self._worker = None

    def _busy(self, workers: Collection[str]) -> set[str]:
        with self._runtime.database.reading() as connection:
            return self._rows.busy(connection, workers)

    def _announce_ends(self, now: int) -> None:
        if self._worker is not None and self._without_worker:
            self._unannounced.update(self._without_worker)
            self._without_worker.clear()
        for number, end in list(self._unannounced.items()):
            row, by_worker = end.row, words.by_worker(end.row)
            if by_worker and row.ended_at > now - FLUSH_MS:
                continue  # after the worker's own events
            if by_worker or (row.lost and row.worker):
                self._broker.send(words.ended(row, row.worker, gone=end.gone))
            elif (worker := self._worker or row.worker) is not None:
                self._broker.send(words.ended(row, worker, gone=self._worker is None))
            else:
                if not end.hinted:
                    self._broker.send(words.hint(row))
                    end.hinted = True
                _keep(self._without_worker, number, end)
            del self._unannounced[number]


def _keep(memory: OrderedDict[int, _End], number: int, end: _End) -> None:
    memory[number] = end
    while len(memory) > TRACKED_MAX:
        memory.popitem(last=False)


def _remember(memory: OrderedDict[Any, None], key: Any) -> None:
    memory[key] = None
    while len(memory) > 2 * TRACKED_MAX:
        memory.popitem(last=False)
