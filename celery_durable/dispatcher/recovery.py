"""Recovery: moves operations on when a heartbeat, a due time or an expiry has passed (design, sections 6 and 12)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sqlalchemy import Connection

from celery_durable.outcomes import loss_encoder
from celery_durable.permits.limits import merge_declared
from celery_durable.permits.messages import Declared
from celery_durable.results import tells
from celery_durable.runtime import Runtime
from celery_durable.store import accounts
from celery_durable.store.losses import Losses
from celery_durable.store.recovery import Moved, Recoveries
from celery_durable.store.schema import ADMITTED, CANCELLED, FAILED, PERMIT_STATES
from celery_durable.store.untold import Untold

if TYPE_CHECKING:
    from celery import Celery

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
        app: Celery,
        runtime: Runtime,
        *,
        on_wakes: Callable[[], None] = _nothing,
        on_admitted: Callable[[], None] = _nothing,
    ) -> None:
        self._app = app
        self._database = runtime.database
        self._tables = runtime.tables
        self._statements = Recoveries(runtime.tables)
        self._untold = Untold(runtime.tables)
        self._losses = Losses(
            runtime.tables,
            losses_max=runtime.settings.max_worker_losses,
            encode=loss_encoder(app, bytes_max=runtime.settings.error_bytes_max),
        )
        self._batch_max = runtime.settings.recovery_batch_max
        self._on_wakes = on_wakes
        self._on_admitted = on_admitted

    def step(self) -> float | None:
        """One batch of each kind (a :data:`~celery_durable.scheduling.loop.Step`)."""
        with self._database.autocommit() as connection:
            due_s = self._statements.seconds_until_due(connection)
        if due_s > 0:
            return due_s
        moved = (
            self._move(self._recover_lost, "recovery.lost")
            + self._move(self._expire, "recovery.expire")
            + self._move(self._promote, "recovery.promote")
        )
        # Rows that others hold are overdue and stay so for now: no reason to spin.
        return None if moved else float("inf")

    def _move(self, work: Callable[[Connection], Sequence[Moved]], place: str) -> int:
        with self._database.transaction(place) as connection:
            moved = work(connection)
            woken: dict[str, Declared] = {}
            for one in moved:
                if one.account is not None and one.state not in PERMIT_STATES:
                    woken[one.account] = merge_declared(woken.get(one.account), one.declared)
            accounts.wake_declaring(connection, self._tables, woken)
            if moved:
                # A failure has errbacks perhaps, whatever the result backend is.
                told_states = {FAILED, CANCELLED} if tells(self._app) else {FAILED}
                self._untold.mark(connection, [one.id for one in moved if one.state in told_states])
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
        losses = self._losses.end_overdue(connection, self._batch_max)
        for loss in losses:
            logger.warning("operation %s: %s; it is %s", loss.lost.id, loss.text, loss.state)
        return [Moved(loss.lost.id, loss.lost.account, loss.state) for loss in losses]
