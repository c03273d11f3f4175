"""``python -m celery_durable.leash``: ends process groups when the process that started them is gone, however it went.

It reads ``+group`` and ``-group`` lines from its standard input, a pipe that only its parent writes to. The end of the
pipe means that the parent ended, even by SIGKILL, which no process can act on itself. It then sends SIGTERM to the
groups that are left and, after :data:`GRACE_S`, SIGKILL: groups, since a worker's pool would outlive its main process.
"""

from __future__ import annotations

import os
import signal
import sys
import time

GRACE_S = 5.0


def signal_group(group: int, number: int) -> bool:
    """Sends ``number`` to the process group; False if nothing of it is left."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def main() -> None:
    """Holds the leash until standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    left = [group for group in groups if signal_group(group, signal.SIGTERM)]
    deadline = time.monotonic() + GRACE_S
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = [group for group in left if signal_group(group, 0)]
    for group in left:
        signal_group(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
