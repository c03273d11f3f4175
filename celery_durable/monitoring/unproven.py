"""Ends that a worker announces by itself, kept until it is known to have lived long enough to do so.

A worker that is killed between the settle and its event announces nothing, ever. Nobody can see whether it did, but it
did if the same process still lives some seconds later and is through with the task (hooks run in between): so each
worker with ends of late is asked since when it lives, and with what it is busy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
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


@dataclass(frozen=True, slots=True)
class Unannounced:
    """An end that its worker has not announced, and whether that worker is gone."""

    row: Any
    gone: bool


class Unproven:
    """The ends, at most ``most``: above that the oldest are taken as announced."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._ends: OrderedDict[int, Any] = OrderedDict()
        self._misses: dict[str, int] = {}

    def add(self, row: Any) -> None:
        """An end that ``row.worker`` is to announce."""
        self._ends[row.order_no] = row
        while len(self._ends) > self._most:
            self._ends.popitem(last=False)

    def workers(self, now_ms: int) -> set[str]:
        """Those that are to be asked now."""
        return set(self._by_worker(now_ms))

    def judge(self, now_ms: int, lives: Mapping[str, Life], busy: Collection[str]) -> list[Unannounced]:
        """Forgets the ends that their workers have announced, and returns those that they have not.

        :param lives: what :meth:`workers` of the same ``now_ms`` answered, as far as they did.
        :param busy: those whose silence says nothing.
        """
        unannounced = []
        for worker, rows in self._by_worker(now_ms).items():
            life = lives.get(worker)
            if life is None:
                if worker in busy or not self._missed(worker):
                    continue
                over = rows
                unannounced += [Unannounced(row, gone=True) for row in rows]
            else:
                over = [row for row in rows if row.id not in life.active]
                born_ms = now_ms - life.uptime_s * 1000
                unannounced += [Unannounced(row, gone=False) for row in over if row.ended_at < born_ms + SLACK_MS]
            self._misses.pop(worker, None)
            for row in over:
                del self._ends[row.order_no]
        return unannounced

    def _by_worker(self, now_ms: int) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for row in self._ends.values():
            if row.ended_at <= now_ms - FLUSH_MS:
                found.setdefault(row.worker, []).append(row)
        return found

    def _missed(self, worker: str) -> bool:
        self._misses[worker] = self._misses.get(worker, 0) + 1
        return self._misses[worker] >= MISSES
