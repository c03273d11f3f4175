"""Tasks that record their runs, for tests. Its settings come as JSON in the environment variable ``EXAMPLE_APP``."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from celery import Celery
from celery.exceptions import Reject

from celery_durable import DurableTask, spool
from tests.example.records import write_record


def make_app(name: str, broker: dict[str, Any], durable: dict[str, Any], records: str) -> Celery:
    """A service's app.

    :param broker: Celery's settings of the broker.
    :param durable: settings of celery-durable.
    :param records: the file of :mod:`tests.example.records`.
    """
    spool.register()
    app = Celery(name, set_as_current=False)
    directory: dict[str, str] = {}
    app.conf.directory = directory
    app.conf.update(broker, durable=durable, broker_connection_retry_on_startup=True)
    path = Path(records)

    @contextmanager
    def recorded(task: Any, account: str, group: str = "") -> Iterator[None]:
        names = {"operation_id": task.request.id, "run": uuid.uuid4().hex, "account": account, "group": group}
        write_record(path, event="start", **names)
        try:
            yield
        finally:
            write_record(path, event="end", **names)

    # Unless shared=False, each of several apps in one process takes over the others' tasks.
    operation = partial(app.task, base=DurableTask, bind=True, shared=False)

    @operation(name="example.add")
    def add(self: Any, x: int, y: int) -> int:
        with recorded(self, ""):
            return x + y

    @operation(name="example.grouped", account="{account}", group="{group}", group_limit=2)
    def grouped(self: Any, account: str, group: str, duration_s: float = 0.02) -> str:
        """Declares the limit of a group, and none of the account: that comes from the holder's rules."""
        with recorded(self, account, group):
            time.sleep(duration_s)
        return group

    @operation(name="example.work", account="{account}", limit=2)
    def work(self: Any, account: str, duration_s: float = 0.02) -> str:
        with recorded(self, account):
            time.sleep(duration_s)
        return account

    @operation(name="example.single", account="{account}")
    def single(self: Any, account: str, duration_s: float = 0.02) -> str:
        with recorded(self, account):
            time.sleep(duration_s)
        return account

    @operation(name="example.limited", account="{account}", limit=lambda account, limit, duration_s=0.02: limit)
    def limited(self: Any, account: str, limit: int, duration_s: float = 0.02) -> str:
        """Declares the limit that its caller says."""
        with recorded(self, account):
            time.sleep(duration_s)
        return account

    @operation(name="example.exclusive", account="{account}", mutex=True)
    def exclusive(self: Any, account: str, duration_s: float = 0.02) -> str:
        with recorded(self, account):
            time.sleep(duration_s)
        return account

    @operation(name="example.until", account="{account}", limit=2)
    def until(self: Any, account: str, flag: str) -> int:
        """Runs until the file ``flag`` is there; returns its process's ID."""
        with recorded(self, account):
            while not Path(flag).exists():
                time.sleep(0.02)
        return os.getpid()

    @operation(name="example.retry_until", account="{account}", limit=2, max_retries=None)
    def retry_until(self: Any, account: str, flag: str) -> int:
        """Retries until the file ``flag`` is there; returns the number of retries."""
        with recorded(self, account):
            if not Path(flag).exists():
                raise self.retry(countdown=0.2)
            retries: int = self.request.retries
            return retries

    @operation(name="example.requeued", account="{account}", limit=2)
    def requeued(self: Any, account: str, flag: str) -> str:
        """Asks to be delivered again, once: then the file ``flag`` is there."""
        with recorded(self, account):
            if not Path(flag).exists():
                Path(flag).touch()
                raise Reject("not now", requeue=True)
        return account

    @operation(name="example.looked_up", account=lambda customer, retries=0: directory[customer], max_retries=10)
    def looked_up(self: Any, customer: str, retries: int = 0) -> str | None:
        """Its account comes from what its caller's process knows; returns what the worker's knows."""
        with recorded(self, customer):
            if self.request.retries < retries:
                raise self.retry(countdown=0.1)
        return directory.get(customer)

    @operation(name="example.suicide", account="{account}", limit=1, max_worker_losses=1)
    def suicide(self: Any, account: str) -> None:
        """Takes its worker's process with it, every time."""
        with recorded(self, account):
            os.kill(os.getpid(), signal.SIGKILL)

    class Lingering(DurableTask[..., Any]):
        """Keeps its worker busy between the settle and the acknowledgement."""

        abstract = True

        def after_return(self, *args: Any) -> None:
            time.sleep(60)

    @app.task(base=Lingering, bind=True, shared=False, name="example.linger", account="{account}", acks_late=True)
    def linger(self: Any, account: str) -> str:
        with recorded(self, account):
            return account

    @operation(name="example.sleep")
    def sleep(self: Any, duration_s: float) -> float:
        with recorded(self, ""):
            time.sleep(duration_s)
        return duration_s

    @operation(name="example.fail")
    def fail(self: Any, message: str) -> None:
        with recorded(self, ""):
            raise ValueError(message)

    @operation(name="example.flaky", max_retries=10, account="{account}", limit=1)
    def flaky(self: Any, account: str, failures: int, countdown_s: float = 0.1) -> int:
        """Retries until it has failed ``failures`` times; returns the number of retries."""
        with recorded(self, account):
            if self.request.retries < failures:
                raise self.retry(countdown=countdown_s)
            retries: int = self.request.retries
            return retries

    @app.task(bind=True, shared=False, name="example.plain")
    def plain(self: Any, x: int) -> int:
        """An ordinary Celery task beside the durable ones."""
        return x

    return app


if "EXAMPLE_APP" in os.environ:
    app = make_app(**json.loads(os.environ["EXAMPLE_APP"]))
