"""Has a worker, or a beat, refuse to start where no durable task could run: a wrong setting, a database not ready.

And has a worker with threads outlive the loss of its broker (case C4).
"""

from __future__ import annotations

import sys
from typing import Any

from celery import signals


def register() -> None:
    """Checks every worker or beat of this process that starts with durable tasks. Cheap; may be called again."""
    for starting in (signals.worker_init, signals.beat_init):
        starting.connect(_check, weak=False, dispatch_uid="celery-durable")


def _check(sender: Any, **_: Any) -> None:
    from celery_durable.errors import ConfigurationError
    from celery_durable.runtime import runtime_of
    from celery_durable.store.migrate import check
    from celery_durable.transactions import require_own
    from celery_durable.worker.seam import WorkerSeam

    app = sender.app
    if not any(isinstance(task, WorkerSeam) for task in app.tasks.values()):
        return
    try:
        runtime = runtime_of(app)
        check(runtime.database, runtime.tables)
        with runtime.database.reading() as connection:
            require_own(runtime, connection)
        runtime.database.dispose()  # the children that are forked must find no connection
    except ConfigurationError as error:
        error.show()
        sys.exit(error.exit_code)  # Celery logs what else a receiver raises, and goes on
    _keep_prefetch_count(app, getattr(sender, "pool_cls", None))


def _keep_prefetch_count(app: Any, pool: Any) -> None:
    """Has a worker with a pool of threads not reduce its prefetch count after it lost its connection.

    Celery 5.7 restores the count from one of those threads. On AMQP that thread and the main one then wait for each
    other's frames, and the worker takes nothing any more.
    """
    from celery.concurrency import get_implementation
    from celery.concurrency.thread import TaskPool

    if pool is not None and issubclass(get_implementation(pool), TaskPool):
        app.conf.worker_enable_prefetch_count_reduction = False
