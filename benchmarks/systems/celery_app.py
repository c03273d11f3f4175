"""Plain Celery: its task, settings and sender."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from celery import Celery

from benchmarks.setting.tally import Tally
from benchmarks.systems.sending import paced, timed

CELERY_SETTINGS: dict[str, Any] = {
    # What Celery's guide on optimising says of many short tasks, where round trips count: 64 or 128, not 4.
    "worker_prefetch_multiplier": 64,
    "broker_connection_retry_on_startup": True,
}
VARIABLE = "BENCH_CELERY"


def make_app(broker: str, results: str | None, acks_late: bool, tally: str) -> Celery:
    """The app. ``results``: URL of the Redis database for results; none: they are ignored."""
    app = Celery("plain", broker=broker, backend=results, set_as_current=False)
    app.conf.update(CELERY_SETTINGS, task_acks_late=acks_late, task_ignore_result=results is None)
    counter = Tally(Path(tally))

    @app.task(name="bench.noop", shared=False)
    def noop(number: int) -> None:
        counter.ran()

    @app.task(name="bench.sent", shared=False)
    def sent(sent_ns: int) -> None:
        counter.ran(sent_ns)

    return app


def send(count: int, **settings: Any) -> dict[str, int]:
    """``delay`` in a loop."""
    task = make_app(**settings).tasks["bench.noop"]
    return timed(task.delay, count)


def send_paced(count: int, **settings: Any) -> dict[str, list[float]]:
    """Calls an idle worker; see :func:`benchmarks.systems.sending.paced`."""
    return paced(make_app(**settings).tasks["bench.sent"].delay, Tally(Path(settings["tally"])), count)


if VARIABLE in os.environ:
    app = make_app(**json.loads(os.environ[VARIABLE]))
