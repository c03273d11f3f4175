"""What both command lines do with their standard output."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from celery_durable.errors import DurableError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


class OutputError(DurableError):
    """What a command prints cannot be written."""


@contextmanager
def written_out() -> Iterator[None]:
    """Has everything written that the block prints. A reader that went away is left to click.

    :raises OutputError: standard output takes no more.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in _FULL:
            raise
        # Else Python tries once more at its end, and says so in several lines.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OutputError(f"standard output: {os.strerror(error.errno)}: give it another file") from None
