"""Recovery: moves operations on when a heartbeat, a due time or an expiry has passed (design, sections 6 and 12)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from sqlalchemy import Connection

from celery_durable.permits.limits import merge_declared
from celery_durable.permits.messages import Declared
from celery_durable.runtime import Runtime
from celery_durable.store import accounts
from celery_durable.store.recovery import LossDecision, LostAttempt, Moved, Recoveries
from celery_durable.store.schema import ADMITTED, CANCELLED, FAILED, PERMIT_STATES, RETRYING
from celery_durable.store.sql import held

logger = logging.getLogger(__name__)


def _nothing() -> None:
    """For a process without passes or delivery."""


class Recovery:
    """Handles what is overdue, a batch of each kind in a transaction of its own. For one thread.

    :param on_wakes: called after the commit of new rows of ``wakes``.
    :param on_admitted: called after the commit of operations that are to be delivered.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        on_wakes: Callable[[], None] = _nothing,
        on_admitted: Callable[[], None] = _nothing,
    ) -> None:
        self._database = runtime.database
        self._tables = runtime.tables
        self._statements = Recoveries(runtime.tables)
        self._batch_max = runtime.settings.recovery_batch_max
        self._max_worker_losses = runtime.settings.max_worker_losses
        self._on_wakes = on_wakes
        self._on_admitted = on_admitted

    def step(self) -> float | None:
        """One batch of each kind (a :data:`~celery_durable.scheduling.loop.Step`)."""
        with held(self._database) as connection:
            due_s = self._statements.seconds_until_due(connection)
        if due_s > 0:
            return due_s
        moved = self._move(self._recover_lost) + self._move(self._expire) + self._move(self._promote)
        # Rows that others hold are overdue and stay so for now: no reason to spin.
        return None if moved else float("inf")

    def _move(self, work: Callable[[Connection], Sequence[Moved]]) -> int:
        with self._database.transaction() as connection:
            moved = work(connection)
            woken: dict[str, Declared] = {}
            for one in moved:
                if one.account is not None and one.state not in PERMIT_STATES:
                    woken[one.account] = merge_declared(woken.get(one.account), one.declared)
            accounts.wake_declaring(connection, self._tables, woken)
        if woken:
            self._on_wakes()
        if any(one.state == ADMITTED for one in moved):
            self._on_admitted()
        return len(moved)

    def _expire(self, connection: Connection) -> Sequence[Moved]:
        return self._statements.expire(connection, self._batch_max)

    def _promote(self, connection: Connection) -> Sequence[Moved]:
        return self._statements.promote(connection, self._batch_max)

    def _recover_lost(self, connection: Connection) -> Sequence[Moved]:
        decisions = [self._decide(lost) for lost in self._statements.overdue(connection, self._batch_max)]
        if decisions:
            self._statements.lose(connection, decisions)
        for decision in decisions:
            logger.warning("operation %s: %s; it is %s", decision.lost.id, decision.error, decision.state)
        return [Moved(one.lost.account, one.state) for one in decisions]

    def _decide(self, lost: LostAttempt) -> LossDecision:
        losses = lost.worker_losses + 1
        own = lost.policy.get("max_worker_losses")
        losses_max = self._max_worker_losses if own is None else int(own)
        what = (
            f"WorkerLostError: attempt {lost.attempt} was lost on {lost.worker or 'an unknown worker'}: its heartbeats "
            f"stopped, overdue by {lost.overdue_ms / 1000:.1f} s"
        )
        if lost.cancel_requested:
            return LossDecision(lost, CANCELLED, f"{what}; it had been asked to stop")
        if losses <= losses_max:
            return LossDecision(lost, RETRYING, what)
        return LossDecision(
            lost,
            FAILED,
            f"{what}; lost attempts: {losses}, max_worker_losses = {losses_max}: find out why its workers die, "
            "or raise max_worker_losses",
        )
