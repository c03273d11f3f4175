"""Tasks that end in every way a task can end, for tests with real workers.

Their settings come as JSON in the environment variable ``WORKER_APP``. Each run of a body leaves a line in the file of
records: its operation, its process, and what happened in it.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from celery import Celery
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded

from celery_durable import DurableTask


class Unpicklable(Exception):
    """Cannot cross to the main process as it is."""

    def __init__(self, a: str, b: str) -> None:
        super().__init__(a)
        self.lock = threading.Lock()


def note(path: Path, task: Any, event: str, **more: Any) -> None:
    """Appends one line by a single write."""
    line = {"id": task.request.id, "event": event, "pid": os.getpid(), "retries": task.request.retries, **more}
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(handle, (json.dumps(line) + "\n").encode())
    finally:
        os.close(handle)


def until(path: str, deadline_s: float = 30) -> None:
    """Waits for a file that the test makes."""
    deadline = time.monotonic() + deadline_s
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.01)


def make_app(celery: dict[str, Any], durable: dict[str, Any], records: str, without: Sequence[str] = ()) -> Celery:
    """The app under test.

    :param without: tasks that it does not know, as in code of an earlier day.
    """
    app = Celery("worker-app", set_as_current=False)
    app.conf.update(celery, durable=durable, broker_connection_retry_on_startup=True)
    path = Path(records)

    class Recorded(DurableTask):  # type: ignore[type-arg]
        abstract = True

        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            note(path, self, "start", imported="confluent_kafka" in sys.modules)

        def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
            note(path, self, "on_success")

        def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
            note(path, self, "on_failure", error=type(exc).__name__)

        def on_retry(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
            note(path, self, "on_retry")

    def durable_task(**options: Any) -> Any:
        return app.task(base=Recorded, bind=True, shared=False, **options)

    @durable_task(name="add")
    def add(self: Any, x: int, y: int) -> int:
        return x + y

    @durable_task(name="late", acks_late=True)
    def late(self: Any, x: int) -> int:
        return x

    @durable_task(name="total")
    def total(self: Any, numbers: list[int]) -> int:
        return sum(numbers)

    @app.task(bind=True, shared=False, name="plain_total")
    def plain_total(self: Any, numbers: list[int]) -> int:
        note(path, self, "start")
        return sum(numbers)

    @app.task(bind=True, shared=False, name="plain_count")
    def plain_count(self: Any, members: list[Any]) -> int:
        note(path, self, "start")
        return len(members)

    @app.task(bind=True, shared=False, name="errback")
    def errback(self: Any, operation_id: str) -> None:
        note(path, self, "errback", of=operation_id)

    @durable_task(name="fail")
    def fail(self: Any, message: str) -> None:
        raise ValueError(message)

    def fail_at_first(self: Any, failures: int, countdown: Any = 0.05) -> int:
        if self.request.retries < failures:
            raise self.retry(countdown=countdown, exc=ValueError("flaky"))
        return int(self.request.retries)

    for name, acks_late in (("flaky", False), ("late_flaky", True)):
        durable_task(name=name, max_retries=5, acks_late=acks_late)(fail_at_first)

    @durable_task(name="retry_args", max_retries=5)
    def retry_args(self: Any, word: str) -> str:
        if self.request.retries == 0:
            raise self.retry(args=("second",), countdown=0)
        return word

    @durable_task(name="auto", autoretry_for=(ValueError,), retry_backoff=False, default_retry_delay=0, max_retries=2)
    def auto(self: Any, failures: int) -> int:
        if self.request.retries < failures:
            raise ValueError("auto")
        return int(self.request.retries)

    def fail_first(self: Any) -> None:
        raise ValueError("first")

    bad_delays: dict[str, dict[str, Any]] = {
        "bad_retry_kwargs": {"retry_kwargs": {"countdown": float("nan")}},
        "bad_retry_delay": {"default_retry_delay": -5},
        "bad_retry_backoff": {"retry_backoff": 1e300, "retry_backoff_max": 10**300, "retry_jitter": False},
        "endless_retry_backoff": {"retry_backoff": float("inf")},
    }
    for name, options in bad_delays.items():
        durable_task(name=name, autoretry_for=(ValueError,), **options)(fail_first)

    @durable_task(name="raising_delay", max_retries=5)
    def raising_delay(self: Any, divisor: int) -> None:
        raise self.retry(countdown=1 / divisor)

    @durable_task(name="ignored_retry", ignore_result=True, max_retries=5)
    def ignored_retry(self: Any) -> int:
        if self.request.retries == 0:
            raise self.retry(countdown=0)
        return 7

    @durable_task(name="quiet_retry", max_retries=5)
    def quiet_retry(self: Any) -> str:
        if self.request.retries == 0:
            self.retry(countdown=0, throw=False)
            return "first"
        return "second"

    @durable_task(name="bare_retry")
    def bare_retry(self: Any) -> None:
        raise Retry("never sent")

    @durable_task(name="ignore")
    def ignore(self: Any) -> None:
        raise Ignore

    @durable_task(name="reject")
    def reject(self: Any) -> None:
        raise Reject("no good", requeue=False)

    @durable_task(name="requeue")
    def requeue(self: Any, flag: str) -> str:
        if not os.path.exists(flag):
            Path(flag).touch()
            raise Reject("not now", requeue=True)
        return "done"

    @durable_task(name="replaced")
    def replaced(self: Any, chained: bool) -> None:
        add_one = add.s(1, 1)
        raise self.replace(add_one | add.s(1) if chained else add_one)

    @durable_task(name="unserialisable")
    def unserialisable(self: Any) -> Any:
        return object()

    @durable_task(name="unpicklable")
    def unpicklable(self: Any) -> None:
        raise Unpicklable("x", "y")

    @durable_task(name="huge_error")
    def huge_error(self: Any) -> None:
        raise ValueError("x" * 5_000_000)

    @durable_task(name="exit", max_worker_losses=1)
    def exit_(self: Any, kind: str) -> None:
        if kind == "SystemExit":
            raise SystemExit(3)
        if kind == "KeyboardInterrupt":
            raise KeyboardInterrupt
        if kind == "CancelledError":
            raise asyncio.CancelledError
        if kind == "MemoryError":
            raise MemoryError("too much")
        os._exit(5)

    @durable_task(name="soft", soft_time_limit=0.5)
    def soft(self: Any, catch: bool) -> str:
        try:
            time.sleep(20)
        except SoftTimeLimitExceeded:
            if not catch:
                raise
            return "cleaned up"
        return "never"

    @durable_task(
        name="soft_retried",
        soft_time_limit=0.5,
        autoretry_for=(SoftTimeLimitExceeded,),
        retry_backoff=False,
        default_retry_delay=0,
    )
    def soft_retried(self: Any, times: int) -> int:
        if self.request.retries < times:
            time.sleep(20)
        return int(self.request.retries)

    @durable_task(name="hard", time_limit=1)
    def hard(self: Any, stubborn: bool = False) -> None:
        while True:
            try:
                time.sleep(20)
            except BaseException:
                note(path, self, "interrupted")
                if not stubborn:
                    raise

    @durable_task(name="sleep")
    def sleep(self: Any, duration_s: float) -> float:
        try:
            deadline = time.monotonic() + duration_s
            while time.monotonic() < deadline:
                time.sleep(0.02)
        except BaseException as error:
            note(path, self, "stopped", error=type(error).__name__, soft=isinstance(error, SoftTimeLimitExceeded))
            raise
        return duration_s

    def wait_for(self: Any, flag: str) -> str:
        until(flag)
        return "waited"

    for name, acks_late in (("wait", True), ("early_wait", False)):
        durable_task(name=name, max_worker_losses=1, acks_late=acks_late)(wait_for)

    @durable_task(name="eager_to_retry", autoretry_for=(Exception,), max_retries=5, default_retry_delay=0)
    def eager_to_retry(self: Any, flag: str) -> int:
        try:
            until(flag)
        except SoftTimeLimitExceeded:
            note(path, self, "stopped")
            raise
        return int(self.request.retries)

    @durable_task(name="wait_and_retry", max_retries=5)
    def wait_and_retry(self: Any, flag: str) -> int:
        until(flag)
        if self.request.retries == 0:
            raise self.retry(countdown=0)
        return int(self.request.retries)

    @durable_task(name="swallow", max_worker_losses=1)
    def swallow(self: Any, flag: str) -> str:
        deadline = time.monotonic() + 30
        while not os.path.exists(flag) and time.monotonic() < deadline:
            try:
                time.sleep(0.02)
            except SoftTimeLimitExceeded:
                note(path, self, "swallowed")
        return "swallowed"

    @durable_task(name="hold_gil", max_worker_losses=0)
    def hold_gil(self: Any, duration_s: float) -> str:
        ctypes.PyDLL(None).usleep(int(duration_s * 1_000_000))
        return "held"

    class Lingering(Recorded):
        """Settled, and not acknowledged before the test says so."""

        abstract = True

        def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
            note(path, self, "settled")
            until(retval)

    @app.task(base=Lingering, bind=True, shared=False, name="linger", acks_late=True)
    def linger(self: Any, flag: str) -> str:
        return flag

    for name in without:
        del app.tasks[name]
    return app


if "WORKER_APP" in os.environ:
    app = make_app(**json.loads(os.environ["WORKER_APP"]))
