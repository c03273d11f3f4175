"""Celery tasks that cannot be lost, and that never run more than N at a time per account.

Everything is loaded on first use, so that the holder, which imports parts of this package, never loads Celery, and a
web process or a worker never loads Kafka.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery_durable import limits
    from celery_durable.commands import forfeit, pause, resume
    from celery_durable.control import OperationStatus, Purged, cancel, purge_before, status, usage
    from celery_durable.enqueue import Enqueued
    from celery_durable.errors import (
        AttemptLost,
        ConfigurationError,
        DuplicateOperationError,
        DurableError,
        EnqueueError,
        NonRetryable,
        OperationNotFound,
        SchemaError,
    )
    from celery_durable.monitoring.inspect import Account, AccountGroup
    from celery_durable.results import DurableAsyncResult
    from celery_durable.scope import using
    from celery_durable.task import DurableTask, durable_task

__all__ = [
    "Account",
    "AccountGroup",
    "AttemptLost",
    "ConfigurationError",
    "DuplicateOperationError",
    "DurableAsyncResult",
    "DurableError",
    "DurableTask",
    "EnqueueError",
    "Enqueued",
    "NonRetryable",
    "OperationNotFound",
    "OperationStatus",
    "Purged",
    "SchemaError",
    "cancel",
    "durable_task",
    "forfeit",
    "limits",
    "pause",
    "purge_before",
    "resume",
    "status",
    "usage",
    "using",
]

_MODULES = {
    "Account": "monitoring.inspect",
    "AccountGroup": "monitoring.inspect",
    "AttemptLost": "errors",
    "ConfigurationError": "errors",
    "DuplicateOperationError": "errors",
    "DurableAsyncResult": "results",
    "DurableError": "errors",
    "DurableTask": "task",
    "EnqueueError": "errors",
    "Enqueued": "enqueue",
    "NonRetryable": "errors",
    "OperationNotFound": "errors",
    "OperationStatus": "control",
    "Purged": "control",
    "SchemaError": "errors",
    "cancel": "control",
    "durable_task": "task",
    "forfeit": "commands",
    "pause": "commands",
    "purge_before": "control",
    "resume": "commands",
    "status": "control",
    "usage": "control",
    "using": "scope",
}


def __getattr__(name: str) -> Any:
    if name == "limits":
        return import_module("celery_durable.limits")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"celery_durable.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
