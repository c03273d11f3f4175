"""Operations that wait cost their worker nothing, and lose nothing where no worker can run them yet."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import func, select, text, update

from celery_durable import spool
from tests.e2e.worker_rig import Rig
from tests.harness import Process, wait_until

pytestmark = pytest.mark.processes

MakeRig = Callable[..., Rig]
MANY = 100_000
SENT_MAX = 50
READY = 3 * SENT_MAX
GROWTH_MAX = 10_000_000
"""Bytes. A message of an ETA that a Celery worker keeps for itself takes it kilobytes."""


@pytest.fixture
def make_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeRig]:
    """Makes a prefork rig on SQLite and a folder as the broker."""
    with ExitStack() as stack:

        def make(**durable: Any) -> Rig:
            celery = {"broker_url": spool.url(tmp_path / "broker")}
            rig = Rig(tmp_path, f"sqlite:///{tmp_path / 'db.sqlite3'}", celery, pool="prefork", **durable)
            stack.callback(rig.close)
            stack.callback(lambda: request.session.testsfailed and print(rig.logs()))
            rig.dispatch()
            return rig

        yield make


def states(rig: Rig) -> Counter[str]:
    """How many operations are in each state."""
    operations = rig.runtime.tables.operations
    with rig.runtime.database.reading() as connection:
        rows = connection.execute(select(operations.c.state, func.count()).group_by(operations.c.state))
        return Counter({row[0]: row[1] for row in rows})


def multiply(rig: Rig, operation_id: str, times: int) -> None:
    """Makes copies of an operation, under IDs of their own."""
    tables = rig.runtime.tables
    numbers = f"WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < {times}) "
    with rig.runtime.database.transaction() as connection:
        for table in (tables.operations, tables.payloads):
            names = [column.name for column in table.c if column.name != "order_no"]
            own = {"id": "id || n", "headers": "json_set(headers, '$.id', id || n)"}
            columns, values = ", ".join(f'"{name}"' for name in names), ", ".join(own.get(n, f'"{n}"') for n in names)
            copies = f"{numbers} SELECT {values} FROM {table.name}, n WHERE id = :id"
            connection.execute(text(f"INSERT INTO {table.name} ({columns}) {copies}"), {"id": operation_id})


def resident(worker: Process) -> int:
    """Bytes of memory that the worker's processes use."""
    main = psutil.Process(worker.pid)
    return sum(process.memory_info().rss for process in (main, *main.children()))


def test_what_waits_costs_a_worker_no_memory(make_rig: MakeRig) -> None:
    """C7: 100,000 with an ETA, and a backlog: the worker's memory does not grow; it is killed, and none is lost."""
    rig = make_rig(sent_not_started_max=SENT_MAX, resend_min_s=5.0, resend_max_s=10.0)
    worker = rig.worker(concurrency=1)
    first = rig.call("add", 0, 0)
    rig.ended(first)
    before = resident(worker)
    later = rig.call("add", 1, 1, countdown=3_600)
    multiply(rig, later, MANY - 1)  # while nothing runs: it takes SQLite's lock for longer than a heartbeat's timeout
    flag = rig.flag("go")
    rig.started(rig.call("wait", str(flag)))
    ready = rig.call("add", 20, 22)
    multiply(rig, ready, READY - 1)
    wait_until(lambda: rig.sent("celery") >= SENT_MAX, 60, what="as many sent as may be")
    wait_until(lambda: rig.log_has(f"[{ready}"), 60, what="some of it is prefetched")
    assert resident(worker) - before < GROWTH_MAX
    assert rig.sent("celery") <= SENT_MAX
    assert states(rig) == {"scheduled": MANY, "admitted": READY, "running": 1, "succeeded": 1}
    worker.kill()
    flag.touch()
    worker = rig.worker(concurrency=2)
    wait_until(lambda: states(rig)["succeeded"] == READY + 2, 120, what="the backlog's end")
    assert states(rig) == {"scheduled": MANY, "succeeded": READY + 2}
    operations = rig.runtime.tables.operations
    with rig.runtime.database.transaction() as connection:
        connection.execute(update(operations).where(operations.c.id == later).values(due_at=1))
    assert rig.result(later).get(timeout=60) == 2
    assert states(rig)["scheduled"] == MANY - 1
    assert rig.runs(later) == rig.runs(ready) == 1
    assert resident(worker) - before < GROWTH_MAX + before / 2  # one process more


def test_a_task_that_its_worker_does_not_know(make_rig: MakeRig) -> None:
    """C16: a message that reaches a worker of yesterday's code: reported there, not failed, and sent again until a
    worker of today's has it."""
    rig = make_rig(resend_min_s=0.3, resend_max_s=0.5)
    rig.worker(concurrency=1, without=("add",))
    operation_id = rig.call("add", 1, 2)
    wait_until(lambda: rig.log_has("Received unregistered task of type 'add'"), what="the old worker's report")
    assert rig.row(operation_id).state in {"admitted", "scheduled"}
    rig.worker(concurrency=1)
    ids = [operation_id, *(rig.call("add", number, 1) for number in range(6))]
    for each in ids:
        assert rig.ended(each, 60).state == "succeeded"
        assert (rig.runs(each), rig.history(each), rig.row(each).attempt) == (1, [], 1)


def test_what_nobody_can_run_gives_its_permit_back(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    """C22: for a queue that nobody reads, or a task that no worker knows: after some sends it waits without a permit,
    with a warning, and runs when there is somebody."""
    rig = make_rig(resend_min_s=0.2, resend_max_s=2.0, sends_max=2)
    rig.worker(concurrency=1, without=("add",))
    with caplog.at_level(logging.WARNING):
        unread, unknown = rig.call("late", 1, queue="nowhere"), rig.call("add", 1, 2)
        for operation_id in (unread, unknown):
            wait_until(lambda: rig.row(operation_id).state == "scheduled", what="its permit is back")  # noqa: B023
        wait_until(lambda: caplog.text.count(" 2 times") >= 2, 10, what="two warnings")
    assert "queue 'nowhere'" in caplog.text
    assert "queue 'celery'" in caplog.text
    rig.worker(concurrency=1, extra=("--queues", "celery,nowhere"))
    assert (rig.ended(unread, 60).state, rig.ended(unknown, 60).state) == ("succeeded", "succeeded")
    assert [rig.history(each) for each in (unread, unknown)] == [[], []]
