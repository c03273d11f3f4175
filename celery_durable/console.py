"""What both command lines do with output and errors."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import click

from celery_durable.errors import ConfigurationError, DurableError

if TYPE_CHECKING:
    from rich.console import Console

FAILED = 1
PIPE_WIDTH = 100_000
"""More than any row needs: a table is as wide as its longest cells."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


@contextmanager
def plainly() -> Iterator[None]:
    """Has everything written that the block prints; an error by design is one line on stderr and exit code 1.

    Left to click: a :class:`ConfigurationError`, which is one line and exit code 2, and a reader that went away.
    """
    try:
        yield
        sys.stdout.flush()
    except ConfigurationError:
        raise
    except DurableError as error:
        _fail(str(error))
    except OSError as error:
        if error.errno not in _FULL:
            raise
        # Else Python tries once more at its end, and says so in several lines.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _fail(f"standard output: {os.strerror(error.errno)}: give it another file")


def wide_console() -> Console:
    """Where tables are printed: as wide as the terminal, and without one each row in one line, for ``grep``."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def _fail(text: str) -> NoReturn:
    click.echo(f"Error: {' '.join(text.split())}", err=True)
    sys.exit(FAILED)
