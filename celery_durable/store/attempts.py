"""Start, heartbeat and settle: what a worker writes of an operation (rule 2: its own row, and inserts).

Each is one conditional UPDATE on the run token, with its inserts in the same statement (PostgreSQL) or one short
transaction (SQLite), prepared, on the calling thread's held connection: the hot path. Each may be repeated after
an error that left open whether it happened: the repeat returns what the first has written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from celery_durable.crashpoints import crashpoint
from celery_durable.errors import AttemptLost, DurableError
from celery_durable.store.accounts import wake
from celery_durable.store.attempt_sql import RETURNED, AttemptStatements, Settle, Settles
from celery_durable.store.bell import Bell
from celery_durable.store.database import Database
from celery_durable.store.schema import (
    CANCELLED,
    FAILED,
    LOST,
    PERMIT_STATES,
    RETRIED,
    RETRYING,
    SCHEDULED,
    SUCCEEDED,
    Tables,
)
from celery_durable.store.untold import GRACE_MS, Mark, Untold

if TYPE_CHECKING:
    from celery_durable.message import CapturedMessage
    from celery_durable.store.losses import Losses


@dataclass(frozen=True, slots=True)
class Attempt:
    """Which attempt of which operation, under which run token."""

    id: str
    generation: int
    attempt: int
    token: str
    tells: bool = False
    """The app's own result backend is told how the operation ends: what ends it leaves a mark until that is done."""
    errbacks: bool = False
    """The same for ``link_error``, unless it ends well."""

    has_account: bool = True
    """Its operation has one, or may have: what ends it wakes the account."""

    def marks(self, state: str) -> bool:
        """Whether an end in this state leaves a mark."""
        return self.tells or (self.errbacks and state != SUCCEEDED)


@dataclass(frozen=True, slots=True)
class Started:
    """The attempt is this token's: its body may run. ``requeue_after_s`` None: the setting holds."""

    requeue_after_s: float | None
    cancel_requested: bool
    has_account: bool


@dataclass(frozen=True, slots=True)
class Beat:
    """The attempt is alive and this token's."""

    cancel_requested: bool


@dataclass(frozen=True, slots=True)
class Ending:
    """What an attempt leaves in its row: an encoded result or exception, and texts for people. All may be absent."""

    content_type: str | None = None
    content_encoding: str | None = None
    result: bytes | None = None
    error: str | None = None
    traceback: str | None = None

    def params(self) -> dict[str, Any]:
        """As the statements name them."""
        return {
            "content_type": self.content_type,
            "content_encoding": self.content_encoding,
            "result": self.result,
            "error": self.error,
            "traceback": self.traceback,
        }


class OperationHeld(DurableError):
    """Another transaction holds the row, for example that of a cancel not yet committed: it is not waited for."""


class AlreadySettled(AttemptLost):
    """The attempt is no longer its token's. ``settled_as``: how it ended before, None where nothing tells."""

    def __init__(self, message: str, settled_as: str | None) -> None:
        super().__init__(message)
        self.settled_as = settled_as


class Attempts:
    """What attempts write to one client's tables. Errors of the driver are raised as they are."""

    def __init__(self, database: Database, tables: Tables, bell: Bell | None = None) -> None:
        self._database = database
        self._tables = tables
        self._postgresql = database.dialect == "postgresql"
        self._untold = Untold(tables)
        self._bell = bell
        self._statements = AttemptStatements(tables, database.dialect, database.engine.dialect.identifier_preparer)

    def start(self, attempt: Attempt, *, worker: str, timeout_ms: int) -> Started | None:
        """Makes the attempt this token's, alive for ``timeout_ms``.

        None: it is not to be run; it was delivered twice, has ended, expired, or is another attempt's turn. The same
        token may start again: its first answer may have been lost.
        """
        params = {**_key(attempt), "worker": worker, "timeout_ms": timeout_ms}
        crashpoint("worker.start", "before_commit")
        row = self._one(self._statements.start, params)
        crashpoint("worker.start", "after_commit")
        if row is None:
            return None
        policy: dict[str, Any] = (json.loads(row[2]) if isinstance(row[2], str) else row[2]) or {}
        return Started(policy.get("requeue_after_s"), row[0] is not None, row[1] is not None)

    def beat(self, operation_id: str, token: str, *, timeout_ms: int) -> Beat | None:
        """Extends the attempt's life to ``timeout_ms`` from now; None: it is no longer this token's.

        :raises OperationHeld: another transaction holds the row.
        """
        params = {"id": operation_id, "token": token, "timeout_ms": timeout_ms}
        crashpoint("worker.beat", "before_commit")
        row = self._one(self._statements.beat, params)
        crashpoint("worker.beat", "after_commit")
        if row is not None:
            return Beat(row[0] is not None)
        if self._owns(operation_id, token):
            raise OperationHeld(f"another transaction holds the row of operation {operation_id}")
        return None

    def succeed(self, attempt: Attempt, ending: Ending) -> str:
        """Ends the operation as succeeded."""
        settles = self._statements.end if attempt.has_account else self._statements.end_without_account
        return self._settle("worker.succeed", settles, attempt, SUCCEEDED, {"state": SUCCEEDED, **ending.params()})

    def fail(self, attempt: Attempt, ending: Ending) -> str:
        """Ends the operation as failed."""
        params = {"state": FAILED, "outcome": FAILED, **ending.params()}
        return self._settle("worker.fail", self._statements.fail, attempt, FAILED, params)

    def cancel(self, attempt: Attempt, ending: Ending) -> str:
        """Ends the running operation as cancelled."""
        return self._settle(
            "worker.cancel", self._statements.end, attempt, CANCELLED, {"state": CANCELLED, **ending.params()}
        )

    def revoke(self, attempt: Attempt, ending: Ending) -> str:
        """Ends the operation as cancelled, if this attempt was not started yet, or runs under this token."""
        return self._settle("worker.revoke", self._statements.revoke, attempt, CANCELLED, ending.params())

    def retry(self, attempt: Attempt, message: CapturedMessage, ending: Ending, *, requeue: bool) -> str:
        """Has the operation run again as ``message``, when that is due, or ends it if its cancel was requested.

        It keeps its permit until then, unless ``requeue``. Returns ``retrying``, ``scheduled`` or ``cancelled``.
        """
        params = {
            **ending.params(),
            "state": SCHEDULED if requeue else RETRYING,
            "outcome": RETRIED,
            "delay_ms": message.eta_delay_ms or 0,
            "due_at": message.eta_at_ms,
            "retries": message.retries,
            "queue": message.queue,
            "priority": message.priority,
            "expires_delay_ms": message.expires_delay_ms,
            "expires_at": message.expires_at_ms,
            "body": message.body,
            "body_type": message.content_type,
            "body_encoding": message.content_encoding,
            "headers": json.dumps(message.headers),
            "properties": json.dumps(message.properties),
            "publish": json.dumps(message.publish),
        }
        return self._settle("worker.retry", self._statements.retry, attempt, RETRIED, params)

    def repeat(self, attempt: Attempt, ending: Ending) -> str:
        """Has the operation run again at once with the same message. Returns ``retrying`` or ``cancelled``."""
        params = {"outcome": RETRIED, **ending.params()}
        return self._settle("worker.repeat", self._statements.repeat, attempt, RETRIED, params)

    def lose(self, attempt: Attempt, why: str, losses: Losses) -> str:
        """Ends the attempt as lost with its worker. Returns ``retrying``, ``failed`` or ``cancelled``.

        :param why: how its body ended, for people.
        :raises AlreadySettled: the attempt is no longer this token's. A repeat raises it too: it cannot be told apart
            from the same by a dispatcher's recovery.
        """
        with self._database.transaction("worker.lose") as connection:
            loss = losses.end_own(connection, attempt, why)
            if loss is not None:
                wake(connection, self._tables, [None if loss.state in PERMIT_STATES else loss.lost.account])
                if attempt.marks(loss.state):
                    self._untold.mark(connection, [attempt.id], grace_ms=GRACE_MS)
        if loss is None:
            raise self._refusal(attempt, LOST, *self._written(attempt))
        return loss.state

    def told(self, marks: Sequence[Mark]) -> None:
        """Takes back the marks of ends that were told."""
        with self._database.transaction("worker.told") as connection:
            self._untold.told(connection, marks)

    def _settle(self, place: str, settles: Settles, attempt: Attempt, outcome: str, params: dict[str, Any]) -> str:
        """Returns the operation's state after it.

        :raises AlreadySettled: the attempt is no longer this token's, and was not settled in this way before.
        """
        params.update(_key(attempt))
        settle = settles.marked if attempt.marks(outcome) else settles.silent
        if self._postgresql:
            crashpoint(place, "before_commit")
            row = self._one(settle.whole, params)
        else:
            row = self._in_steps(place, settle, params)
        crashpoint(place, "after_commit")
        if row is not None:
            if row[1] is not None and self._bell is not None:
                self._bell.ring("passes", held=True)
            return str(row[2])
        state, earlier = self._written(attempt)
        if outcome == (earlier or state):
            return str(state or RETRYING)
        raise self._refusal(attempt, outcome, state, earlier)

    def _owns(self, operation_id: str, token: str) -> bool:
        return self._one(self._statements.owns, {"id": operation_id, "token": token}) is not None

    def _written(self, attempt: Attempt) -> tuple[str | None, str | None]:
        """(the state in which the operation ended under this token, the attempt's outcome in the history)."""
        written = self._one(self._statements.written, {"id": attempt.id, "token": attempt.token})
        return (None, None) if written is None else (written[0], written[1])

    def _refusal(self, attempt: Attempt, outcome: str, state: str | None, earlier: str | None) -> AlreadySettled:
        settled_as = state or earlier
        reason = "it is not this run's any more" if settled_as is None else f"it was settled as {settled_as} before"
        return AlreadySettled(
            f"attempt {attempt.attempt} of operation {attempt.id} cannot be settled as {outcome}: {reason}", settled_as
        )

    def _one(self, sql: str, params: dict[str, Any]) -> Sequence[Any] | None:
        connection: Any = self._database.held().connection.driver_connection
        if self._postgresql:
            row: Sequence[Any] | None = connection.execute(sql, params, prepare=True).fetchone()
            return row
        rows = connection.execute(sql, params).fetchall()  # all: an open cursor keeps SQLite's lock
        return rows[0] if rows else None

    def _in_steps(self, place: str, settle: Settle, params: dict[str, Any]) -> Sequence[Any] | None:
        connection: Any = self._database.held().connection.driver_connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            row = self._one(settle.update, params)
            if row is not None:
                params = {**params, **{f"done_{name}": value for name, value in zip(RETURNED, row, strict=True)}}
                for statement in settle.then:
                    connection.execute(statement, params)
            crashpoint(place, "before_commit")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return row


def _key(attempt: Attempt) -> dict[str, Any]:
    return {
        "id": attempt.id,
        "generation": attempt.generation,
        "attempt": attempt.attempt,
        "token": attempt.token,
    }
