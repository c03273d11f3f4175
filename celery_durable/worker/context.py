"""What the attempts of one app share in one process."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

from celery import signals

from celery_durable.outcomes import loss_encoder
from celery_durable.runtime import Runtime, runtime_of
from celery_durable.store.attempts import Attempts
from celery_durable.store.losses import Losses
from celery_durable.worker.heartbeat import Heart

_ATTRIBUTE = "_celery_durable_worker"
_lock = threading.Lock()


@dataclass(frozen=True)
class WorkerContext:
    """The app's runtime, its statements, and this process's heartbeats."""

    runtime: Runtime
    attempts: Attempts
    losses: Losses
    heart: Heart
    pid: int


def context_of(app: Any) -> WorkerContext:
    """This process's context of the app, made on first use and again after a fork.

    :raises ConfigurationError: a setting is missing or wrong.
    """
    context: WorkerContext | None = app.__dict__.get(_ATTRIBUTE)
    if context is None or context.pid != os.getpid():
        with _lock:
            context = app.__dict__.get(_ATTRIBUTE)
            if context is None or context.pid != os.getpid():
                context = _make(app)
                setattr(app, _ATTRIBUTE, context)
    return context


def _make(app: Any) -> WorkerContext:
    runtime = runtime_of(app)
    attempts = Attempts(runtime.database, runtime.tables, runtime.bell)
    losses = Losses(
        runtime.tables,
        losses_max=runtime.settings.max_worker_losses,
        encode=loss_encoder(app, bytes_max=runtime.settings.error_bytes_max),
    )
    for ending in (signals.worker_process_shutdown, signals.worker_shutdown):
        ending.connect(partial(_flush, app), weak=False, dispatch_uid=f"celery-durable-told-{id(app)}")
    heart = Heart(runtime.database, attempts, interval_s=runtime.settings.heartbeat_interval_s)
    return WorkerContext(runtime, attempts, losses, heart, os.getpid())


def _flush(app: Any, **_: Any) -> None:
    context: WorkerContext | None = app.__dict__.get(_ATTRIBUTE)
    if context is not None and context.pid == os.getpid():
        context.heart.flush()
