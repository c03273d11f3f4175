"""What a process loads, seen in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path


def loaded(code: str, folder: Path) -> set[str]:
    script = textwrap.dedent(code) + "\nimport sys\nprint(*sorted(sys.modules))\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_package_loads_next_to_nothing(tmp_path: Path) -> None:
    modules = loaded("import celery_durable; celery_durable.EnqueueError; dir(celery_durable)", tmp_path)
    assert not {"celery", "kombu", "sqlalchemy", "pydantic", "alembic", "confluent_kafka"} & modules


def test_enqueue_cancel_and_commands_never_load_kafka(tmp_path: Path) -> None:
    """Rule 3: a web process loads no librdkafka."""
    modules = loaded(
        """
        import celery_durable
        from celery import Celery
        from celery_durable import DurableTask
        from celery_durable.runtime import runtime_of
        from sqlalchemy import insert

        app = Celery("billing", broker="redis://127.0.0.1:1", backend="redis://127.0.0.1:1")
        app.conf.durable = {"client_id": "billing", "database_url": "sqlite:///x.db"}

        @app.task(base=DurableTask, account="{tenant}")
        def charge(tenant): ...

        runtime = runtime_of(app)
        runtime.tables.metadata.create_all(runtime.database.engine)
        with runtime.database.transaction() as connection:
            connection.execute(insert(runtime.tables.counters), [{"name": "command_seq", "value": 0}])
        result = charge.delay("acme")
        assert result.state == "PENDING"
        result.revoke()
        celery_durable.limits.set("acme", 3)
        celery_durable.pause("acme")
        runtime.database.dispose()
        """,
        tmp_path,
    )
    assert "celery_durable.task" in modules
    assert "confluent_kafka" not in modules
