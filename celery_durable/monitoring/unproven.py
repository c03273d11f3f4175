"""Ends that a worker tells by itself, kept until it is known to have lived long enough to do so.

A worker that is killed between the settle and its event tells nothing, ever. Nobody can see whether it did, but it did
if the same process still lives some seconds later and is through with the task (hooks run in between): so each worker
with ends of late is asked since when it lives, and with what it is busy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FLUSH_MS = 2_000
"""A worker that lives has sent its event so long after the settle."""
SLACK_MS = 2_000
"""Celery's uptimes are rounded, and as old as their answer."""
MISSES = 2
"""A worker that does not answer so many times in a row is gone, unless its row shows it alive."""


@dataclass(frozen=True, slots=True)
class Life:
    """What a worker says of itself: how long it lives, rounded to whole seconds, and the IDs of what it runs."""

    uptime_s: float
    active: frozenset[str]


Ask = Callable[[Sequence[str]], Mapping[str, Life]]
"""Asks workers by their names; those that do not answer are left out."""


@dataclass(frozen=True, slots=True)
class Untold:
    """An end that its worker has not told, and whether that worker is gone."""

    row: Any
    gone: bool


class Unproven:
    """The ends, at most ``most``: above that the oldest are taken as told."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._ends: OrderedDict[int, Any] = OrderedDict()
        self._misses: dict[str, int] = {}
        self._answered = False

    def add(self, row: Any) -> None:
        """An end that ``row.worker`` is to tell."""
        self._ends[row.order_no] = row
        while len(self._ends) > self._most:
            self._ends.popitem(last=False)

    def judge(
        self,
        now_ms: int,
        ask: Ask,
        any_worker: Callable[[], str | None],
        running: Callable[[Collection[str]], set[str]],
    ) -> list[Untold]:
        """Asks the workers, forgets what they have told, and returns what they have not.

        :param any_worker: asks all workers, and names one that answers: it shows that they can be asked at all.
        :param running: which of these workers have an attempt that is alive: such a one may be too busy to answer.
        """
        by_worker: dict[str, list[Any]] = {}
        for row in self._ends.values():
            if row.ended_at <= now_ms - FLUSH_MS:
                by_worker.setdefault(row.worker, []).append(row)
        if not by_worker:
            return []
        lives = ask(sorted(by_worker))
        self._answered = self._answered or bool(lives) or any_worker() is not None
        busy = running(by_worker.keys() - lives.keys()) if self._answered else by_worker.keys()
        untold = []
        for worker, rows in by_worker.items():
            life = lives.get(worker)
            if life is None:
                if worker in busy or not self._missed(worker):
                    continue  # it may yet answer, or nobody does: then nothing can be told from that
                untold += [Untold(row, gone=True) for row in rows]
            else:
                born_ms = now_ms - life.uptime_s * 1000
                untold += [
                    Untold(row, gone=False)
                    for row in rows
                    if row.id not in life.active and row.ended_at < born_ms + SLACK_MS
                ]
            self._misses.pop(worker, None)
            for row in rows:
                if life is None or row.id not in life.active:
                    del self._ends[row.order_no]
        return untold

    def _missed(self, worker: str) -> bool:
        self._misses[worker] = self._misses.get(worker, 0) + 1
        return self._misses[worker] >= MISSES
