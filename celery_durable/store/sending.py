"""How often an attempt that does not start is sent to Celery, as SQL: its column ``sends`` counts in rounds.

A round is ``sends_max`` counts. Its sends are further and further apart. When the last of them has brought no start,
the operation gives its permit back and waits, each time longer (case C22); giving back counts as one, so that the next
round begins behind the boundary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, case, literal, literal_column

from celery_durable.settings import Settings
from celery_durable.store.schema import ADMITTED
from celery_durable.store.sql import in_states

GIVE_BACK_MAX_MS = 3_600_000
"""Longest wait of an operation that nobody starts, between two rounds."""


def unsent(operations: Any) -> ColumnElement[bool]:
    """SQL: admitted, and never sent. In words that match its partial index: a bound value would not."""
    return and_(in_states(operations, (ADMITTED,)), operations.c.sends == literal_column("0"))


def sent(operations: Any) -> ColumnElement[bool]:
    """SQL: admitted, sent, and not started. In such words too."""
    return and_(in_states(operations, (ADMITTED,)), operations.c.sends > literal_column("0"))


@dataclass(frozen=True, slots=True)
class Resends:
    """The delays, in ms."""

    min_ms: int
    max_ms: int
    sends_max: int

    @classmethod
    def of(cls, settings: Settings) -> Resends:
        """As the settings say."""
        minimum = max(1, round(settings.resend_min_s * 1000))
        return cls(minimum, max(minimum, round(settings.resend_max_s * 1000)), settings.sends_max)

    def delay_ms(self, sends: ColumnElement[int]) -> ColumnElement[Any]:
        """SQL: from this send, the one after ``sends`` others, to the next."""
        steps: dict[int, int] = {}
        delay = self.min_ms
        while delay < self.max_ms and len(steps) < self.sends_max:
            steps[len(steps)] = delay
            delay *= 2
        return _stepwise(steps, sends % self.sends_max, self.max_ms)

    def round_over(self, sends: ColumnElement[int]) -> ColumnElement[bool]:
        """SQL: the last send of a round is behind; if it is due again, nobody started it."""
        return and_(sends > 0, sends % self.sends_max == 0)

    def give_back_ms(self, sends: ColumnElement[int]) -> ColumnElement[Any]:
        """SQL: how long the operation waits after the round that is over."""
        steps: dict[int, int] = {}
        delay = self.max_ms
        while delay < GIVE_BACK_MAX_MS:
            steps[len(steps) + 1] = delay
            delay *= 2
        return _stepwise(steps, sends // self.sends_max, max(self.max_ms, GIVE_BACK_MAX_MS))


def _stepwise(steps: dict[int, int], number: ColumnElement[int], beyond: int) -> ColumnElement[Any]:
    return case(steps, value=number, else_=beyond) if steps else literal(beyond)
