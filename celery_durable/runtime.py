"""What one Celery app needs to use its database: settings, engine, tables. Made on first use, once per app."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from celery_durable import settings as settings_module
from celery_durable.settings import Settings
from celery_durable.store.bell import Bell
from celery_durable.store.database import Database
from celery_durable.store.schema import Tables, build_tables

if TYPE_CHECKING:
    from celery import Celery

_ATTRIBUTE = "_celery_durable_runtime"
_lock = threading.Lock()


@dataclass(frozen=True)
class Runtime:
    """The settings, the database, and the tables of one app."""

    settings: Settings
    database: Database
    tables: Tables

    @cached_property
    def bell(self) -> Bell:
        """What is rung when an enqueue has committed."""
        return Bell(self.database, self.tables)


def app_or_current(app: Celery | None) -> Celery:
    """The app that was given, else the current one."""
    if app is not None:
        return app
    from celery import current_app

    current: Celery = current_app._get_current_object()
    return current


def runtime_of(app: Celery) -> Runtime:
    """The app's runtime, the same one for all threads.

    :raises ConfigurationError: naming the setting that is missing or wrong.
    """
    runtime: Runtime | None = getattr(app, _ATTRIBUTE, None)
    if runtime is None:
        with _lock:
            runtime = getattr(app, _ATTRIBUTE, None)
            if runtime is None:
                runtime = _make(app)
                setattr(app, _ATTRIBUTE, runtime)
    return runtime


def _make(app: Celery) -> Runtime:
    settings = settings_module.load(app)
    database = Database(
        settings.database_url.get_secret_value(),
        schema=settings.database_schema,
        pool_size=settings.database_pool_size,
    )
    return Runtime(settings, database, build_tables(settings.table_prefix, settings.database_schema))
