"""Help with names that are nearly right."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def nearest(name: object, known: Collection[str], *, list_all: bool = True) -> str:
    """``", did you mean …?"`` for a name that is nearly one of ``known``; else, with ``list_all``, the known ones."""
    matches = difflib.get_close_matches(str(name), known, n=1)
    if matches:
        return f", did you mean {matches[0]!r}?"
    return f"; known are {', '.join(sorted(known))}" if list_all else ""
