"""What a user of celery-durable writes: an app, and a task with an account and a limit.

The demo runs it twice, as two services that share nothing but Kafka: ``billing.py`` and ``crm.py``.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from celery import Celery

from celery_durable import DurableTask, spool
from examples.api_calls.jobs import LIMITS

API_TIMEOUT_S = 30


class ApiUnavailable(Exception):
    """The API answered that the call should be made again."""


def tenant_limit(tenant: str, ms: int, workflow: str | None = None) -> int:  # noqa: ARG001 - the task's signature
    """How many calls of the tenant may be in flight, from all services together."""
    return LIMITS[tenant]


def make_app(name: str) -> Celery:
    """The service's app, with a database and a broker of its own in the demo's folder."""
    folder = Path(os.environ["DEMO_FOLDER"])
    app = Celery(name, broker=spool.url(folder / f"{name}-broker"), set_as_current=False)
    app.conf.worker_prefetch_multiplier = 1
    app.conf.durable = {
        "client_id": name,
        "database_url": f"sqlite:///{folder / name}.sqlite3",
        # Short, so that what a killed worker left comes back while you watch.
        "heartbeat_interval_s": 1.0,
        "heartbeat_timeout_s": 3.0,
        "resend_min_s": 2.0,
        "idle_return_s": 3.0,
    }

    @app.task(
        base=DurableTask,
        bind=True,
        name=f"{name}.call_api",
        account="tenant:{tenant}",
        limit=tenant_limit,
        autoretry_for=(ApiUnavailable, urllib.error.URLError, ConnectionError),
        retry_backoff=True,
        retry_backoff_max=5,
        max_retries=10,
    )
    def call_api(self: Any, tenant: str, ms: int, workflow: str | None = None) -> dict[str, Any]:
        """Calls the API once. The operation's ID is the idempotency key: a second attempt has no second effect."""
        request = urllib.request.Request(
            f"{os.environ['DEMO_API']}/tenants/{tenant}/calls",
            data=json.dumps({"ms": ms, "workflow": workflow}).encode(),
            headers={"Idempotency-Key": self.request.id, "X-Run-Token": self.run_token},
        )
        try:
            with urllib.request.urlopen(request, timeout=API_TIMEOUT_S) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except urllib.error.HTTPError as error:
            if error.code == 503:
                raise ApiUnavailable("503 Service Unavailable") from None
            raise

    return app
