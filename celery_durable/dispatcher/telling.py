"""Tells the app's own result backend, and errbacks, of ends that nobody else has told it (case C23).

A worker that was killed between its settle and the telling, a result backend that was away, an operation that was lost,
expired or cancelled where there was no worker to tell: a chord would wait for ever. What may have been told is told
again: Redis counts a member of a chord once, and a backend that counts by increments is told only what it
does not have. An errback may be called twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from celery import states
from celery.app.task import Context
from celery.backends.base import KeyValueStoreBackend
from kombu.serialization import loads, prepare_accept_content

from celery_durable.results import durable_backend, keeps
from celery_durable.runtime import Runtime
from celery_durable.store.untold import TRIES_MAX, Ended, Mark, Untold
from celery_durable.worker.backend import SettlingBackend

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger(__name__)

_FAILING_S = 10.0
"""A batch ends when failures took so long: each try of a backend that is away takes its time, and others are due.
Not with a number of them: those that can never be told would keep the others from it."""
_SHOWN_MAX = 3
"""Failures of one batch that are logged one by one."""
_EMBEDDED = ("callbacks", "errbacks", "chain", "chord")


class Telling:
    """Tells what is due, one batch at a time. For one thread."""

    def __init__(self, app: Celery, runtime: Runtime) -> None:
        self._app = app
        self._database = runtime.database
        self._untold = Untold(runtime.tables)
        self._batch_max = runtime.settings.recovery_batch_max

    def step(self) -> float | None:
        """One batch (a :data:`~celery_durable.scheduling.loop.Step`)."""
        with self._database.autocommit() as connection:
            due_s = self._untold.seconds_until_due(connection)
        if due_s > 0:
            return due_s
        with self._database.transaction("telling.claim") as connection:
            given_up = self._untold.give_up(connection)
            left = self._untold.claim(connection, self._batch_max)
        for mark in given_up:
            logger.error(
                "operation %s has ended, and what follows could not be told in %d tries: it is given up; a chord, or "
                "whoever waits in the app's result backend, waits in vain; the warnings before say why",
                mark.operation_id,
                TRIES_MAX,
            )
        untold = self._tell_all(left)
        with self._database.transaction("telling.told") as connection:
            self._untold.told(connection, [mark for mark in left if mark not in untold])
        return None if left or given_up else float("inf")

    def _tell_all(self, marks: Sequence[Mark]) -> set[Mark]:
        """Tells what still is as it was marked; returns what could not be told, or was not tried."""
        with self._database.autocommit() as connection:
            batches = self._untold.batches(connection, marks)
        untold = {mark for batch in batches for mark in batch}
        failed, failing_s = 0, 0.0
        for batch in batches:
            with self._database.autocommit() as connection:
                ended = self._untold.load(connection, batch)
            untold -= set(batch) - {one.mark for one in ended}
            for one in ended:
                begun = time.monotonic()
                try:
                    self._tell(one)
                except Exception as error:  # noqa: BLE001 - what a backend, an errback or a body's serializer raises
                    failed += 1
                    failing_s += time.monotonic() - begun
                    logger.log(
                        logging.WARNING if failed <= _SHOWN_MAX else logging.INFO,
                        "operation %s has ended, and what follows could not be told: %s: %s; it is tried again later",
                        one.mark.operation_id,
                        type(error).__name__,
                        str(error).strip(),
                    )
                    if failing_s >= _FAILING_S:
                        return untold
                    continue
                except SystemExit:
                    operation_id = one.mark.operation_id
                    logger.warning("operation %s has ended, and an errback of it raised SystemExit", operation_id)
                untold.remove(one.mark)
        return untold

    def _tell(self, ended: Ended) -> None:
        operation_id = ended.mark.operation_id
        meta = durable_backend(self._app).get_task_meta(operation_id, cache=False)
        if meta["status"] not in states.READY_STATES:
            return
        task = self._app.tasks.get(ended.task)
        backend = self._app.backend if task is None else task.backend
        request = self._request(ended)
        if _has_it(backend, operation_id, request):
            return
        if meta["status"] == states.SUCCESS:
            backend.mark_as_done(operation_id, meta["result"], request)
            return
        # As a worker's request decides: the backend itself looks at ignore_result only where all went well.
        kept = not request.ignore_result or bool(getattr(task, "store_errors_even_if_ignored", False))
        if meta["status"] == states.REVOKED:
            backend.mark_as_revoked(operation_id, str(meta["result"]), request, store_result=kept)
        else:
            backend.mark_as_failure(operation_id, meta["result"], meta["traceback"], request, store_result=kept)

    def _request(self, ended: Ended) -> Context:
        """The request as the worker that ran it had it, as far as a backend looks at it."""
        accept = prepare_accept_content(self._app.conf.accept_content)
        args, kwargs, embedded = loads(ended.body, ended.content_type, ended.content_encoding, accept=accept)
        return Context(
            {
                **ended.headers,
                **{name: embedded.get(name) for name in _EMBEDDED},
                "id": ended.mark.operation_id,
                "task": ended.task,
                "args": args,
                "kwargs": kwargs,
                "correlation_id": ended.properties.get("correlation_id"),
                "reply_to": ended.properties.get("reply_to"),
                "delivery_info": {},
            }
        )


def _has_it(backend: Any, operation_id: str, request: Context) -> bool:
    """Whether the backend has this end already, and would count a chord's member twice."""
    target = backend.forward_to if isinstance(backend, SettlingBackend) else backend
    if not keeps(target) or not request.chord:
        return False
    by_increments = getattr(type(target), "on_chord_part_return", None) is KeyValueStoreBackend.on_chord_part_return
    return by_increments and target.get_state(operation_id) in states.READY_STATES
