"""An app with a database of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery

from celery_durable.runtime import runtime_of


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Celery]:
    app = Celery("seam", set_as_current=False)
    durable = {"client_id": "seam", "database_url": f"sqlite:///{tmp_path / 'db.sqlite3'}"}
    app.conf.update(durable={**durable, "kafka_bootstrap_servers": "127.0.0.1:1"}, broker_url="memory://")
    runtime = runtime_of(app)
    runtime.tables.metadata.create_all(runtime.database.engine)
    yield app
    runtime.database.dispose()
