"""Has a Python process, and its children, obey the orders in ``CRASH_FOLDER``: with this folder on ``PYTHONPATH``.

An order is a line ``POINT NTH ACTION`` of the file ``orders``: what to do at the nth passing of a crash point, counted
over all processes that obey this folder. Orders are read at every passing, so they may change while a process runs.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from celery_durable import crashpoints

_FOLDER = Path(os.environ.get("CRASH_FOLDER", ""))
_LINE = 12


def _obey(point: str) -> None:
    try:
        orders = (_FOLDER / "orders").read_text()
    except FileNotFoundError:
        return
    for order in orders.splitlines():
        name, nth, action = order.split(" ")
        if name == point and _passing(point) == int(nth):
            _act(point, action)


def _passing(point: str) -> int:
    """The number of this passing: the kernel gives every line that is appended a place of its own."""
    handle = os.open(_FOLDER / f"passed.{point}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(handle, f"{os.getpid():{_LINE - 1}}\n".encode())
        return os.lseek(handle, 0, os.SEEK_CUR) // _LINE
    finally:
        os.close(handle)


def _act(point: str, action: str) -> None:
    kind, _, value = action.partition(":")
    if kind == "sleep":
        time.sleep(float(value))
    elif kind == "raise":
        raise RuntimeError(f"raised at {point}")
    else:
        marker = _FOLDER / f"died.{point}"
        marker.with_suffix(".partial").write_text(str(os.getpid()))
        marker.with_suffix(".partial").replace(marker)
        os.kill(os.getpid(), signal.SIGKILL)


if "CRASH_FOLDER" in os.environ:
    crashpoints.arm(_obey)
