"""Has a worker refuse to start where it could run no durable task: a wrong setting, or a database that is not ready."""

from __future__ import annotations

import sys
from typing import Any

from celery import signals

CONFIGURATION_ERROR = 2


def register() -> None:
    """Checks every worker of this process that starts with durable tasks. Cheap; may be called again."""
    signals.worker_init.connect(_check, weak=False, dispatch_uid="celery-durable")


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
        # Celery logs what a receiver raises, and goes on, unless it is this.
        sys.stderr.write(f"Error: {' '.join(str(error).split())}\n")
        sys.exit(CONFIGURATION_ERROR)
