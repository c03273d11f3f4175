"""What a task's body really did, apart from what celery-durable believes: one JSON line an event."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Record:
    """An event of one run of a task's body."""

    event: str
    """``start`` or ``end``."""
    operation_id: str
    run: str
    """Told apart from every other run, of the same operation too."""
    account: str
    time_ns: int
    """By CLOCK_MONOTONIC, which all processes of the machine share."""
    pid: int
    group: str = ""


def write_record(path: Path, *, event: str, operation_id: str, run: str, account: str, group: str = "") -> None:
    """Appends one line by a single write, so that lines of several processes never mix."""
    record = Record(event, operation_id, run, account, time.monotonic_ns(), os.getpid(), group)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(handle, (json.dumps(asdict(record)) + "\n").encode())
    finally:
        os.close(handle)


def read_records(path: Path) -> list[Record]:
    """The records, ordered by time."""
    records = [Record(**json.loads(line)) for line in whole_lines(path)]
    return sorted(records, key=lambda record: record.time_ns)


def whole_lines(path: Path) -> list[str]:
    """The lines of a file that others append to; none, if it is not there yet.

    A reader sees a write that crosses a page of memory in parts: a line without its end is not there yet.
    """
    if not path.exists():
        return []
    text = path.read_text()
    return text[: text.rfind("\n") + 1].splitlines()


def most_at_once(records: list[Record]) -> dict[str, int]:
    """The highest number of runs at one instant, by account. A run without an end ends never."""
    now: dict[str, int] = {}
    most: dict[str, int] = {}
    for record in records:
        now[record.account] = now.get(record.account, 0) + (1 if record.event == "start" else -1)
        most[record.account] = max(most.get(record.account, 0), now[record.account])
    return most
