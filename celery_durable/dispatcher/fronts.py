"""Whether what was sent to a Celery queue and has not started is lost, or waits its turn. Pure decisions.

A queue's front is the operation in it that is due first to be sent again. While the front moves, workers start one
after the other, and to send again what is behind it would only give them more to drop. A front that stands is a lost
message, or a broker that lost all, or a queue that nobody consumes: first the front alone is sent again, and if it
still does not move, all that is due.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

TOGETHER_MS = 100
"""What is due so shortly after the front was sent with it, and is as probably lost."""
ALL_MS = 2**62
"""Later than anything is due, and fits a bigint."""


@dataclass(frozen=True, slots=True)
class _Front:
    due_ms: int | None
    """None: it was sent again, and the next one was not seen yet."""
    since_s: float | None = None
    """When it was last seen to move, or sent again (monotonic); None: neither."""
    sent_again: bool = False
    """It has not moved since then."""


class Fronts:
    """The queues' fronts, as one dispatcher sees them. Due times are Unix ms of the database's clock.

    :param patience_s: a front that has not moved for so long stands.
    """

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self._known: dict[str, _Front] = {}

    def look(self, due_ms: Mapping[str, int], now_s: float) -> None:
        """When the front of each queue is due; to a queue that is not there nothing was sent that has not started."""
        self._known = {queue: _seen(self._known.get(queue), due, now_s) for queue, due in due_ms.items()}

    def lost_until_ms(self, queue: str, now_s: float) -> int | None:
        """What is due until then is to be sent again; None: nothing of the queue, or not yet."""
        front = self._known.get(queue)
        if front is None or front.due_ms is None:
            return None
        if front.since_s is None:
            return ALL_MS
        if now_s - front.since_s < self.patience_s:
            return None
        return ALL_MS if front.sent_again else front.due_ms + TOGETHER_MS

    def sent_again(self, queue: str, now_s: float, *, is_all: bool) -> None:
        """What was lost was sent again: that the front is another one then is no move.

        :param is_all: no more was due than that; else the rest is to follow, if all that is due was to be sent.
        """
        if not is_all and self.lost_until_ms(queue, now_s) == ALL_MS:
            self._known.pop(queue)
        else:
            self._known[queue] = _Front(None, since_s=now_s, sent_again=True)


def _seen(front: _Front | None, due_ms: int, now_s: float) -> _Front:
    if front is None:
        return _Front(due_ms)
    if front.due_ms is None or due_ms == front.due_ms:
        return replace(front, due_ms=due_ms)
    return _Front(due_ms, since_s=now_s) if due_ms > front.due_ms else _Front(due_ms)
