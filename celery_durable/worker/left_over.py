"""A ``using()`` that a task's body entered and did not leave: it ends with the body, not with the thread.

What is published for the task afterwards, its links and its chain's next step, must not go into a transaction that
nobody will commit; nor must what later tasks of the thread enqueue.
"""

from __future__ import annotations

import threading

from celery import current_task
from celery.utils.log import get_logger

from celery_durable import scope
from celery_durable.worker import runs
from celery_durable.worker.runs import Run

logger = get_logger(__name__)


def end_after_body() -> None:
    """To be called while callbacks are published: does nothing unless those of an attempt are, whose body is over."""
    run = runs.of_thread(threading.get_ident())
    if run is None:
        return
    request = current_task.request if current_task else None
    if request is not None and not request.is_eager and request.id == run.attempt.id:
        end(run)


def end(run: Run) -> None:
    """Ends what is in force in this thread, with a warning."""
    if scope.end_left_over():
        logger.warning(
            "Operation %s: its task entered using() and did not leave it: write `with using(session): …`. "
            "What it enqueued there is kept only if it has committed that transaction",
            run.attempt.id,
        )
