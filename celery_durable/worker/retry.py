"""A retry is caught where Celery would publish it, and written by the settle of the attempt that asked for it."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from celery_durable.errors import EnqueueError
from celery_durable.worker import runs

if TYPE_CHECKING:
    from celery import Task

    from celery_durable.declaration import RetryDelay
    from celery_durable.message import CapturedMessage


def retry_delay_s(task: str, delay: RetryDelay, error: BaseException | None, retries: int) -> float | None:
    """What the task's ``retry_delay`` says; None: it leaves the delay to Celery's options.

    :raises EnqueueError: it raised, or gave what is no number of seconds. Whether the number is one that an operation
        can wait for is seen where the retry's message is made. (Either ends the operation as failed: case C12.)
    """
    try:
        value: Any = delay(error, retries)
    except Exception as raised:
        raise EnqueueError(
            f"{task}: retry_delay: its callable raised {type(raised).__name__}: {raised}; it is called with the "
            f"attempt's error, {error!r:.100}, and the number of retries before it, {retries}"
        ) from raised
    if value is None:
        return None
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise EnqueueError(
            f"{task}: retry_delay gave {value!r:.100}: give seconds, a timedelta, or None for Celery's own delay"
        )
    return seconds


def is_retry(task: Task, operation_id: str | None, retries: int) -> bool:
    """Whether sending ``task`` under this ID with this count of retries is the retry of the attempt that runs now.

    True inside ``task``'s own attempt of the same operation with more retries than it has, as ``self.retry()`` and
    ``autoretry_for`` send it.
    """
    run = runs.of_request(task.request)
    return run is not None and run.attempt.id == operation_id and retries > run.retries


def stage_retry(task: Task, captured: CapturedMessage) -> None:
    """Keeps the retry of the attempt that runs now until the attempt settles. No SQL.

    :raises EnqueueError: ``task`` runs no attempt of this operation now. (Celery turns what is raised here, or where
        the message is made, an invalid delay for one, into a terminal failure: case C12.)
    """
    run = runs.of_request(task.request)
    if run is None or run.attempt.id != captured.id:
        raise EnqueueError(
            f"task_id = {captured.id!r}: this is not the attempt that runs now; use a task_id of its own"
        )
    run.staged = captured
