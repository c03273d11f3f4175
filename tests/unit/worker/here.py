"""Attempts that run in the test's own thread, as a worker runs them."""

from __future__ import annotations

import os
from typing import Any

from celery.app.trace import build_tracer
from sqlalchemy import update

from celery_durable.message import ATTEMPT_HEADER, RUN_HEADER
from celery_durable.runtime import runtime_of


def run_here(task: Any, **request: Any) -> Any:
    """Runs a new operation's first attempt in this thread, as a worker would. Returns its result handle."""
    operation = task.delay()
    runtime = runtime_of(task.app)
    with runtime.database.transaction() as connection:
        connection.execute(update(runtime.tables.operations).values(state="admitted"))
    task.__trace__ = build_tracer(task.name, task, app=task.app)
    headers = {ATTEMPT_HEADER: 1, RUN_HEADER: {"token": "token", "pid": os.getpid()}}
    known = {"id": operation.id, "hostname": "celery@one", "is_eager": False, "delivery_info": {}}
    task.__trace__(operation.id, (), {}, {**known, **headers, **request})
    return operation
