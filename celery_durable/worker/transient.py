"""Errors of a database that is away for a moment, and patience with them."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from typing import TypeVar

from celery.utils.log import get_logger
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from celery_durable.store.database import Database

logger = get_logger(__name__)

T = TypeVar("T")

_PAUSE_MIN_S, _PAUSE_MAX_S = 0.02, 1.0
_SQLITE_PASSING = ("locked", "busy", "unable to open", "disk i/o error")


def is_transient(error: BaseException) -> bool:
    """Whether the same statement may succeed later: connection lost or refused, locks, a restart under way."""
    if isinstance(error, DBAPIError) and error.orig is not None:
        return error.connection_invalidated or is_transient(error.orig)
    if isinstance(error, sqlite3.OperationalError):
        return any(text in str(error).lower() for text in _SQLITE_PASSING)
    if isinstance(error, PoolTimeoutError):
        return True
    module, name = type(error).__module__, {kind.__name__ for kind in type(error).__mro__}
    return module.startswith("psycopg") and bool(name & {"OperationalError", "InterfaceError"})


def persist(database: Database, action: Callable[[], T], *, patience_s: float, what: str) -> T:
    """Calls ``action`` until it succeeds, for ``patience_s`` while its errors are transient; raises the last of them.

    ``action`` may have happened although it raised, and must be safe to repeat.
    """
    deadline = time.monotonic() + patience_s
    pause_s = _PAUSE_MIN_S
    while True:
        try:
            return action()
        except Exception as error:
            database.drop_held()
            if not is_transient(error) or time.monotonic() + pause_s > deadline:
                raise
            log = logger.warning if pause_s >= _PAUSE_MAX_S else logger.info
            log("%s: %s: %s; trying again", what, type(error).__name__, str(error).strip())
        time.sleep(pause_s)
        pause_s = min(_PAUSE_MAX_S, pause_s * 2)
