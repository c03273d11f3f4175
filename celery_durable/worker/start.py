"""Starting an attempt: who may run the body of a message that arrived."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from typing import Any

from celery.exceptions import Ignore, Reject

from celery_durable.message import ATTEMPT_HEADER, GENERATION_HEADER, RUN_HEADER
from celery_durable.store.attempts import Attempt
from celery_durable.worker.context import context_of
from celery_durable.worker.runs import Run
from celery_durable.worker.transient import persist


class NotStarted(Exception):
    """The message's body must not run.

    :param outcome: what Celery is told: ``Ignore`` (acknowledged), or ``Reject`` (refused for good).
    :param level: how the log tells it.
    """

    def __init__(self, reason: str, outcome: Ignore | Reject, level: int) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.level = level


def attempt_of(request: dict[str, Any], task: Any, errbacks: Any) -> Attempt | None:
    """The attempt of the task that a message names; None: it was not sent by a dispatcher."""
    attempt, run = request.get(ATTEMPT_HEADER), request.get(RUN_HEADER)
    if attempt is None or run is None:
        return None
    return Attempt(
        str(request["id"]),
        int(request.get(GENERATION_HEADER) or 1),
        int(attempt),
        run["token"],
        tells=task.backend.tells,
        errbacks=bool(errbacks),
    )


def start(task: Any, request: dict[str, Any]) -> tuple[Run, float]:
    """Starts the attempt that the message names; also returns when that began (monotonic).

    :raises NotStarted: another one started it, it ended, the database is away, or the message names none.
    """
    attempt = attempt_of(request, task, request.get("errbacks"))
    if attempt is None:
        reason = (
            f"the message has no {ATTEMPT_HEADER} header, so no dispatcher sent it and no permit covers it; "
            "enqueue with .delay() or .apply_async() of the task itself, not with send_task()"
        )
        raise NotStarted(reason, Reject(reason, requeue=False), logging.ERROR)
    begun = time.monotonic()

    def write() -> Any:
        nonlocal begun
        begun = time.monotonic()
        return context.attempts.start(attempt, worker=worker, timeout_ms=round(settings.heartbeat_timeout_s * 1000))

    worker = str(request.get("hostname") or "")
    try:
        context = context_of(task.app)
        settings = context.runtime.settings
        what = f"Start of operation {attempt.id}"
        started = persist(context.runtime.database, write, patience_s=settings.heartbeat_timeout_s, what=what)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip()}; the operation stays in SQL and is sent again"
        raise NotStarted(reason, Ignore(reason), logging.ERROR) from error
    if started is None:
        reason = f"attempt {attempt.attempt} was started before, has ended, or is not due"
        raise NotStarted(reason, Ignore(reason), logging.INFO)
    requeue_after_s = started.requeue_after_s
    run = Run(
        attempt if started.has_account else replace(attempt, has_account=False),
        in_child=request[RUN_HEADER]["pid"] != os.getpid(),
        retries=int(request.get("retries") or 0),
        timeout_s=settings.heartbeat_timeout_s,
        requeue_after_s=settings.requeue_after_s if requeue_after_s is None else float(requeue_after_s),
    )
    return run, begun
