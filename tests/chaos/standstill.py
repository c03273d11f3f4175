"""What stands still after a run: operations that do not end, and outboxes that never empty. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

OPERATIONS = "operations"


class Standstill:
    """Looks at what is left, again and again, and says what has not moved since the first look.

    Operations move when one of them has ended. An outbox moves when it was empty once: that its rows are replaced, or
    sent and staged anew for ever, is no progress.
    """

    def __init__(self) -> None:
        self._left: frozenset[str] | None = None
        self._still: set[str] = set()

    def look(self, unfinished: Collection[str], outboxes: Mapping[str, int]) -> bool:
        """Takes what is left now: operations, and rows by outbox. Whether all of it has moved."""
        if self._left is None:
            self._left = frozenset(unfinished)
            self._still = {name for name, rows in outboxes.items() if rows} | ({OPERATIONS} if unfinished else set())
            return not self._still
        if not self._left.issubset(unfinished):
            self._still.discard(OPERATIONS)
        self._still -= {name for name, rows in outboxes.items() if not rows}
        return not self._still

    @property
    def still(self) -> tuple[str, ...]:
        """What has not moved."""
        return tuple(sorted(self._still))
