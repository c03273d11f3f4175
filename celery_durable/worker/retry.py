"""A retry is caught where Celery would publish it, and written by the settle of the attempt that asked for it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from celery_durable.errors import EnqueueError
from celery_durable.worker import runs

if TYPE_CHECKING:
    from celery import Task

    from celery_durable.message import CapturedMessage

RETRY_DELAY_MS_MAX = 10 * 365 * 86_400_000
"""A retry further off than ten years is a mistake."""


def is_retry(task: Task, operation_id: str | None, retries: int) -> bool:
    """Whether sending ``task`` under this ID with this count of retries is the retry of the attempt that runs now.

    True inside ``task``'s own attempt of the same operation with more retries than it has, as ``self.retry()`` and
    ``autoretry_for`` send it.
    """
    run = runs.of_request(task.request)
    return run is not None and run.attempt.id == operation_id and retries > run.retries


def stage_retry(task: Task, captured: CapturedMessage) -> None:
    """Keeps the retry of the attempt that runs now until the attempt settles. No SQL.

    :raises EnqueueError: the delay is negative, not finite or beyond ten years (Celery turns that into a terminal
        failure, case C12), or ``task`` runs no attempt of this operation now.
    """
    run = runs.of_request(task.request)
    if run is None or run.attempt.id != captured.id:
        raise EnqueueError(
            f"task_id = {captured.id!r}: this is not the attempt that runs now; use a task_id of its own"
        )
    delay_ms = captured.eta_delay_ms
    if delay_ms is not None and not (math.isfinite(delay_ms) and 0 <= delay_ms <= RETRY_DELAY_MS_MAX):
        raise EnqueueError(
            f"retry delay = {delay_ms / 1000:g} s: it must be between 0 and {RETRY_DELAY_MS_MAX // 1000} s; "
            "correct countdown, eta, default_retry_delay or retry_backoff"
        )
    run.staged = captured
