"""DBOS: its workflow, worker and sender."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from benchmarks.setting.tally import Tally
from benchmarks.systems.sending import account, timed

NAME, QUEUE, WORKFLOW = "bench", "bench-queue", "noop"


def serve(url: str, tally: str, executor: str, queue: dict[str, Any]) -> None:
    """A worker process, until it is killed."""
    from dbos import DBOS

    counter = Tally(Path(tally))
    DBOS(
        config={
            "name": NAME,
            "system_database_url": url,
            "application_version": "1",
            "executor_id": executor,
            "log_level": "WARNING",
        }
    )

    @DBOS.workflow(name=WORKFLOW)
    def noop(number: int) -> None:
        counter.ran()

    DBOS.launch()
    DBOS.register_queue(QUEUE, **queue)
    threading.Event().wait()


def send(url: str, count: int, accounts: int = 0) -> dict[str, int]:
    """``DBOSClient.enqueue`` in a loop."""
    from dbos import DBOSClient

    client = DBOSClient(system_database_url=url, application_name=NAME)

    def enqueue(number: int) -> object:
        if accounts:
            return client.enqueue(
                {"workflow_name": WORKFLOW, "queue_name": QUEUE, "queue_partition_key": account(number, accounts)},
                number,
            )
        return client.enqueue({"workflow_name": WORKFLOW, "queue_name": QUEUE}, number)

    try:
        return timed(enqueue, count)
    finally:
        client.destroy()
