"""Retention: deletes ended operations, with payload and history, once they were kept long enough (case F3)."""

from __future__ import annotations

from celery_durable.runtime import Runtime
from celery_durable.store.recovery import Recoveries

LOOK_EVERY_S = 10.0
"""How often ended operations are looked at when there was nothing to delete."""


class Retention:
    """Deletes in batches; rows that others hold, and rows that went live again, stay. For one thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._database = runtime.database
        self._statements = Recoveries(runtime.tables)
        self._batch_max = runtime.settings.recovery_batch_max
        self._default_ms = round(runtime.settings.retention_s * 1000)

    def step(self) -> float | None:
        """Deletes one batch (a :data:`~celery_durable.scheduling.loop.Step`)."""
        with self._database.transaction("retention.delete") as connection:
            deleted = self._statements.delete_ended(connection, self._batch_max, self._default_ms)
        return None if deleted else LOOK_EVERY_S
