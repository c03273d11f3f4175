"""One app has one runtime in a process, however many threads ask for it first."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_durable import settings
from celery_durable.runtime import runtime_of


def test_threads_that_ask_at_once_get_the_same_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    app = Celery("billing", set_as_current=False)
    app.conf.durable = {"client_id": "billing", "database_url": f"sqlite:///{tmp_path / 'billing.sqlite3'}"}
    both_load = threading.Barrier(2)
    load = settings.load

    def load_together(*args: Any, **options: Any) -> settings.Settings:
        with suppress(threading.BrokenBarrierError):
            both_load.wait(timeout=0.5)
        return load(*args, **options)

    monkeypatch.setattr(settings, "load", load_together)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(runtime_of, [app, app])
    assert first is second
    first.database.dispose()
