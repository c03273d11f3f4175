"""The tasks of celery-durable's side. Its settings come as :mod:`tests.harness` gives them to an app."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

from celery import Celery

from benchmarks.setting.tally import Tally
from benchmarks.systems.celery_app import CELERY_SETTINGS
from celery_durable import DurableTask

HOLD_POLL_S = 0.0005


def tally_path(records: str | Path) -> Path:
    """The tally beside the records file of the harness, which these tasks do not use."""
    return Path(records).with_name("tally")


def make_app(name: str, broker: dict[str, Any], durable: dict[str, Any], records: str) -> Celery:
    """The app; parameters as of ``tests.example.app.make_app``."""
    app = Celery(name, set_as_current=False)
    app.conf.update(broker, durable=durable, **CELERY_SETTINGS)
    tally = Tally(tally_path(records))
    operation = partial(app.task, base=DurableTask, shared=False)

    @operation(name="bench.noop")
    def noop(number: int) -> None:
        tally.ran()

    @operation(name="bench.limit5", account="{account}", limit=5)
    def limit5(account: str) -> None:
        tally.ran()

    @operation(name="bench.limit1", account="{account}", limit=1)
    def limit1(account: str) -> None:
        tally.ran()

    @operation(name="bench.limited", account="{account}", limit=lambda account, limit: limit)
    def limited(account: str, limit: int) -> None:
        tally.ran()

    @operation(name="bench.work1", account="{account}", limit=1)
    def work1(account: str, duration_s: float) -> None:
        time.sleep(duration_s)
        tally.ran()

    @operation(name="bench.sent")
    def sent(sent_ns: int) -> None:
        tally.ran(sent_ns)

    @operation(name="bench.sent5", account="{account}", limit=5)
    def sent5(account: str, sent_ns: int) -> None:
        tally.ran(sent_ns)

    @operation(name="bench.hold", account="{account}", limit=1)
    def hold(account: str, until: int) -> None:
        """Runs until the tally's flag is ``until``."""
        started_ns = tally.began()
        while tally.flag < until:
            time.sleep(HOLD_POLL_S)
        tally.ran(started_ns=started_ns)

    return app


if "EXAMPLE_APP" in os.environ:
    app = make_app(**json.loads(os.environ["EXAMPLE_APP"]))
