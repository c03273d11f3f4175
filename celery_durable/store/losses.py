"""Attempts that were lost with their worker: counted, capped, and run again or ended. What follows is decided here.

A dispatcher finds the attempts whose heartbeats are overdue; a worker whose child died says so at once. It does not
only end the attempt's ``alive_until`` and leave the rest to a dispatcher: Celery's signals and events, ``link_error``
and the app's own result backend are told by that worker, which has to know what became of the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Select, Update, bindparam, case, insert, or_, select, update

from celery_durable.store.clock import now_ms
from celery_durable.store.schema import CANCELLED, FAILED, LOST, RETRYING, RUNNING, Tables
from celery_durable.store.sql import database_now, execute_many, in_states

if TYPE_CHECKING:
    from celery_durable.store.attempts import Attempt, Ending


@dataclass(frozen=True, slots=True)
class LostAttempt:
    """An attempt that is over although its row says ``running``. The transaction that found it holds the row."""

    order_no: int
    id: str
    generation: int
    attempt: int
    account: str | None
    worker: str | None
    run_token: str | None
    started_at: int | None
    overdue_ms: int
    """How long its heartbeats are overdue; 0 or less: they are not, somebody saw it die."""
    worker_losses: int
    """Before this one."""
    cancel_requested: bool
    policy: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Loss:
    """What became of a lost attempt's operation: ``retrying``, ``failed`` or ``cancelled``, and what it says."""

    lost: LostAttempt
    state: str
    text: str


def decide(lost: LostAttempt, why: str, *, losses_max: int) -> Loss:
    """What follows from the loss. It costs no retry of Celery's, but is counted against ``max_worker_losses``.

    :param losses_max: how many losses are tolerated where the task says nothing; 0: never run again.
    """
    own = lost.policy.get("max_worker_losses")
    losses, losses_max = lost.worker_losses + 1, losses_max if own is None else int(own)
    what = f"attempt {lost.attempt} was lost on {lost.worker or 'an unknown worker'}: {why}"
    if lost.cancel_requested:
        return Loss(lost, CANCELLED, f"{what}; it had been asked to stop")
    if losses <= losses_max:
        return Loss(lost, RETRYING, what)
    remedy = "find out why its workers die, or raise max_worker_losses"
    return Loss(lost, FAILED, f"{what}; lost attempts: {losses}, max_worker_losses = {losses_max}: {remedy}")


class Losses:
    """The statements, built once per process. They work inside the caller's transaction, which wakes the accounts.

    :param losses_max: the setting ``max_worker_losses``.
    :param encode: makes of a loss's text what the operation's row keeps, as of any other failure.
    """

    def __init__(self, tables: Tables, *, losses_max: int, encode: Callable[[str], Ending]) -> None:
        self._tables = tables
        self._losses_max = losses_max
        self._encode = encode
        self._overdue = _overdue(tables)
        self._own = _own(tables)
        self._end = _end(tables)

    def end_overdue(self, connection: Connection, limit: int) -> list[Loss]:
        """Ends running attempts whose ``alive_until`` is over, the longest overdue first, but for rows others hold."""
        found = [_lost(row) for row in connection.execute(self._overdue, {"limit": limit})]
        return self._ended(
            connection,
            [(one, f"its heartbeats stopped, overdue by {max(0, one.overdue_ms) / 1000:.1f} s") for one in found],
        )

    def end_own(self, connection: Connection, attempt: Attempt, why: str) -> Loss | None:
        """Ends the attempt, whose body is known to be over. None: it is no longer its token's."""
        key = {"id": attempt.id, "token": attempt.token}
        row = connection.execute(self._own, key).one_or_none()
        return None if row is None else self._ended(connection, [(_lost(row), why)])[0]

    def _ended(self, connection: Connection, reasons: Sequence[tuple[LostAttempt, str]]) -> list[Loss]:
        losses = [decide(lost, why, losses_max=self._losses_max) for lost, why in reasons]
        if losses:
            rows = [self._row(loss) for loss in losses]
            execute_many(connection, self._end, rows)
            history = insert(self._tables.attempts).values(ended_at=now_ms(), outcome=LOST)
            connection.execute(history, [_history(loss, row["text"]) for loss, row in zip(losses, rows, strict=True)])
        return losses

    def _row(self, loss: Loss) -> Mapping[str, Any]:
        ending = self._encode(loss.text)
        failed = loss.state == FAILED
        return {
            "number": loss.lost.order_no,
            "new_state": loss.state,
            "raised": loss.lost.attempt + (1 if loss.state == RETRYING else 0),
            "text": ending.error,
            "content_type": ending.content_type if failed else None,
            "content_encoding": ending.content_encoding if failed else None,
            "encoded": ending.result if failed else None,
        }


def _lost(row: Any) -> LostAttempt:
    return LostAttempt(
        order_no=row.order_no,
        id=row.id,
        generation=row.generation,
        attempt=row.attempt,
        account=row.account,
        worker=row.worker,
        run_token=row.run_token,
        started_at=row.started_at,
        overdue_ms=int(row.overdue_ms),
        worker_losses=row.worker_losses,
        cancel_requested=row.cancel_requested_at is not None,
        policy=row.policy or {},
    )


def _history(loss: Loss, text: str) -> Mapping[str, Any]:
    return {
        "operation_id": loss.lost.id,
        "generation": loss.lost.generation,
        "attempt": loss.lost.attempt,
        "worker": loss.lost.worker,
        "run_token": loss.lost.run_token,
        "started_at": loss.lost.started_at,
        "error": text,
    }


def _running(tables: Tables) -> Select[Any]:
    operations, payloads = tables.operations, tables.payloads
    return (
        select(
            operations.c.order_no,
            operations.c.id,
            operations.c.generation,
            operations.c.attempt,
            operations.c.account,
            operations.c.worker,
            operations.c.run_token,
            operations.c.started_at,
            operations.c.worker_losses,
            operations.c.cancel_requested_at,
            (database_now() - operations.c.alive_until).label("overdue_ms"),
            payloads.c.policy,
        )
        .outerjoin(payloads, payloads.c.id == operations.c.id)
        .where(in_states(operations, (RUNNING,)))
    )


@lru_cache(maxsize=64)
def _overdue(tables: Tables) -> Select[Any]:
    operations = tables.operations
    return (
        _running(tables)
        .where(operations.c.alive_until <= database_now())
        .order_by(operations.c.alive_until)
        .limit(bindparam("limit"))
        .with_for_update(skip_locked=True, of=operations)
    )


@lru_cache(maxsize=64)
def _own(tables: Tables) -> Select[Any]:
    operations = tables.operations
    return (
        _running(tables)
        .where(operations.c.id == bindparam("id"), operations.c.run_token == bindparam("token"))
        .with_for_update(of=operations)
    )


@lru_cache(maxsize=64)
def _end(tables: Tables) -> Update:
    operations = tables.operations
    # Not IN: an expanding parameter refuses to be executed for several rows at once.
    ended = or_(bindparam("new_state") == FAILED, bindparam("new_state") == CANCELLED)
    return (
        update(operations)
        .where(operations.c.order_no == bindparam("number"))
        .values(
            state=bindparam("new_state"),
            attempt=bindparam("raised"),
            worker_losses=operations.c.worker_losses + 1,
            sends=0,
            due_at=case((ended, None), else_=now_ms()),
            ended_at=case((ended, now_ms()), else_=None),
            result_content_type=bindparam("content_type"),
            result_content_encoding=bindparam("content_encoding"),
            result=bindparam("encoded"),
            error=bindparam("text"),
            traceback=None,
            run_token=case((ended, operations.c.run_token), else_=None),
            alive_until=None,
        )
    )
