"""The Celery app of both services of a chaos run. Its settings come as JSON in the environment ``EXAMPLE_APP``."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from celery import Celery
from celery.exceptions import Retry, SoftTimeLimitExceeded

from celery_durable import DurableTask
from celery_durable.message import ATTEMPT_HEADER
from celery_durable.store.attempts import Attempt, Attempts, Beat, Started
from tests.chaos import history
from tests.chaos.plans import RETRIES, limit_of

STURDY_QUEUE = "sturdy"
"""The queue of operations that kill their process: only prefork workers, which survive that, take from it."""
REQUEUE_COUNTDOWN_S = 3.0
"""Longer than the services' ``requeue_after_s``."""
_SLICE_S = 0.05
_ABORTED = "aborted"


def make_app(name: str, broker: dict[str, Any], durable: dict[str, Any], records: str) -> Celery:
    """A service's app: one task, whose body records itself.

    :param records: the file of :mod:`tests.chaos.history`.
    """
    app = Celery(name, set_as_current=False)
    app.conf.update(broker, durable=durable, broker_connection_retry_on_startup=True)
    app.conf.task_routes = {"chaos.die": {"queue": STURDY_QUEUE}}
    path = Path(records)

    def recorded(task: Any, account: str, group: str, body: Callable[[], str]) -> str:
        names = {"operation": task.request.id, "token": task.run_token}
        attempt = int(getattr(task.request, ATTEMPT_HEADER))
        history.write(
            path,
            history.Started(**names, attempt=attempt, service=name, account=account, group=group, pid=os.getpid()),
        )
        how = _ABORTED
        try:
            token = body()
            how = "returned"
            return token
        except BaseException as error:
            how = _how(error)
            raise
        finally:
            try:
                history.write(path, history.Ended(**names, how=how))
            except SoftTimeLimitExceeded:
                # The attempt is told to stop as its body ends: on threads that is raised wherever it is.
                history.write(path, history.Ended(**names, how=_ABORTED))
                raise

    def run(self: Any, plan: str, duration_s: float, account: str, group: str) -> str:
        """Works for ``duration_s`` and ends as the plan says; returns the run's token."""

        def body() -> str:
            until = time.monotonic() + duration_s
            while time.monotonic() < until:
                time.sleep(_SLICE_S)
            if plan == "fail":
                raise ValueError("as planned")
            if plan == "retry" and self.request.retries < RETRIES:
                raise self.retry(countdown=0.2)
            if plan == "requeue" and not self.request.retries:
                raise self.retry(countdown=REQUEUE_COUNTDOWN_S)
            if plan == "die":
                history.write(path, history.Ended(operation=self.request.id, token=self.run_token, how="died"))
                os.kill(os.getpid(), signal.SIGKILL)
            return str(self.run_token)

        return recorded(self, account, group, body)

    def limit(plan: str, duration_s: float, account: str, group: str) -> int:
        return limit_of(account)

    def group_limit(plan: str, duration_s: float, account: str, group: str) -> int:
        return limit_of(group)

    options = {"base": DurableTask, "bind": True, "shared": False, "max_retries": 10}
    app.task(run, name="chaos.plain", **options)
    permit = {"account": "{account}", "limit": limit, **options}
    app.task(run, name="chaos.permit", **permit)
    app.task(run, name="chaos.grouped", group="{group}", group_limit=group_limit, **permit)
    app.task(run, name="chaos.die", max_worker_losses=1, **permit)
    return app


def record_writes(path: Path) -> None:
    """Has this process's workers record what they wrote: each start and heartbeat that succeeded, with the time when it
    was begun, and each settle of a body's own outcome."""
    start, beat = Attempts.start, Attempts.beat

    def recorded_start(self: Attempts, attempt: Attempt, **more: Any) -> Started | None:
        begun = time.monotonic_ns()
        started = start(self, attempt, **more)
        if started is not None:
            history.write(path, history.Beat(operation=attempt.id, token=attempt.token, time_ns=begun))
        return started

    def recorded_beat(self: Attempts, operation_id: str, token: str, **more: Any) -> Beat | None:
        begun = time.monotonic_ns()
        renewed = beat(self, operation_id, token, **more)
        if renewed is not None:
            history.write(path, history.Beat(operation=operation_id, token=token, time_ns=begun))
        return renewed

    def recorded(settle: Callable[..., str]) -> Callable[..., str]:
        @wraps(settle)
        def settle_and_record(self: Attempts, attempt: Attempt, *rest: Any, **more: Any) -> str:
            state = settle(self, attempt, *rest, **more)
            history.write(path, history.Settled(operation=attempt.id, token=attempt.token))
            return state

        return settle_and_record

    Attempts.start, Attempts.beat = recorded_start, recorded_beat  # type: ignore[method-assign]
    for name in ("succeed", "fail", "cancel", "retry"):
        setattr(Attempts, name, recorded(getattr(Attempts, name)))


def _how(error: BaseException) -> str:
    if isinstance(error, Retry):
        return "retry"
    if isinstance(error, SoftTimeLimitExceeded):
        return _ABORTED
    return "failed" if isinstance(error, ValueError) else f"raised {type(error).__name__}"


if "EXAMPLE_APP" in os.environ:
    _settings = json.loads(os.environ["EXAMPLE_APP"])
    record_writes(Path(_settings["records"]))
    app = make_app(**_settings)
