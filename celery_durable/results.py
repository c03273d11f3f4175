"""Results of operations, read from their rows: the ``durable://`` result backend, and what a call returns.

It keeps results of durable tasks alone. Results of plain tasks, saved groups and Redis-style chords need another
``result_backend``; results of durable tasks are read from SQL then too. An app that names none reads them as well, and
drops those of plain tasks (:class:`UnsetBackend`).
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from celery import states
from celery.app.backends import BACKEND_ALIASES
from celery.backends.base import BaseBackend, DisabledBackend
from celery.exceptions import Retry, TaskError, TaskRevokedError
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import AsyncResult

from celery_durable import scope, transactions
from celery_durable.call_options import storable
from celery_durable.errors import ConfigurationError, EnqueueError
from celery_durable.outcomes import Encoded, bound_text, decode_result
from celery_durable.runtime import Runtime, runtime_of
from celery_durable.store.clock import aware
from celery_durable.store.operations import statements
from celery_durable.store.schema import (
    ADMITTED,
    CANCELLED,
    ENDED_STATES,
    FAILED,
    QUEUED,
    RETRYING,
    RUNNING,
    SCHEDULED,
    SUCCEEDED,
)

if TYPE_CHECKING:
    from celery import Celery

    from celery_durable.store.operations import Cancelled, OperationView

R = TypeVar("R")

logger = logging.getLogger(__name__)

CELERY_STATES = {
    SCHEDULED: states.PENDING,
    QUEUED: states.PENDING,
    ADMITTED: states.PENDING,
    RUNNING: states.STARTED,
    RETRYING: states.RETRY,
    SUCCEEDED: states.SUCCESS,
    FAILED: states.FAILURE,
    CANCELLED: states.REVOKED,
}
"""How each state of an operation looks from Celery (design, section 6)."""

UNKNOWN_S = 10.0
"""Who waits for an operation that is still not there after so long is told."""
_FIRST_POLL_S = 0.02
_ATTRIBUTE = "_celery_durable_backend"


class DurableBackend(BaseBackend):
    """``result_backend = "durable://"``. The worker writes results when it settles an attempt; this reads them."""

    supports_native_join = False
    supports_autoexpire = True  # retention
    supports_result_compression = True
    persistent = True

    def __init__(self, app: Celery, url: str | None = None, **options: Any) -> None:
        super().__init__(app=app, url=url or "durable://", **options)
        self._warned = False

    @property
    def _runtime(self) -> Runtime:
        return runtime_of(self.app)

    def read(self, task_id: str) -> OperationView | None:
        """The operation's row; None: there is none, or no more."""
        if not storable(task_id):
            return None
        runtime = self._runtime
        with transactions.reading(runtime) as connection:
            return statements(connection, runtime.tables).read(connection, task_id)

    def task_result_exists(self, task_id: str) -> bool:
        """Whether there is such an operation, whatever its state."""
        return self.read(task_id) is not None

    def wait_for(
        self,
        task_id: str,
        timeout: float | None = None,
        interval: float = 0.5,
        no_ack: bool = True,  # noqa: ARG002 - Celery's signature
        on_interval: Any = None,
    ) -> dict[str, Any]:
        """Waits until the operation has ended, polling its state ever less often, at most every ``interval`` seconds.

        :raises celery.exceptions.TimeoutError: it has not ended within ``timeout`` seconds.
        :raises RuntimeError: it is not committed yet, so it cannot run while its own caller waits.
        """
        self._ensure_not_eager()
        deadline = None if timeout is None else time.monotonic() + timeout
        nap_s, unknown_at = min(_FIRST_POLL_S, interval), time.monotonic() + UNKNOWN_S
        while True:
            state = self._committed_state(task_id)
            if state in ENDED_STATES:
                return cast(dict[str, Any], self.get_task_meta(task_id))
            if state is None and scope.in_callers_transaction() and self.read(task_id) is not None:
                raise RuntimeError(f"operation {task_id} is not committed yet: wait for it after its transaction")
            if state is None and time.monotonic() >= unknown_at:
                unknown_at = float("inf")
                logger.warning(
                    "Waiting for %s: this service's database has no such operation; it is not committed yet, was "
                    "deleted after its retention, or is a plain task, whose result durable:// does not keep",
                    task_id,
                )
            if on_interval:
                on_interval()
            left_s = float("inf") if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                raise CeleryTimeoutError(
                    f"operation {task_id} has not ended within {timeout:g} s; to see why: "
                    f"celery -A <app> durable why {task_id}"
                )
            time.sleep(min(nap_s, left_s))
            nap_s = min(interval, nap_s * 1.5)

    def _committed_state(self, task_id: str) -> str | None:
        if not storable(task_id):
            return None
        runtime = self._runtime
        with transactions.database_errors(runtime), runtime.database.reading() as connection:
            return statements(connection, runtime.tables).state(connection, task_id)

    def _get_task_meta_for(self, task_id: str) -> dict[str, Any]:
        view = self.read(task_id)
        if view is None:
            return {"task_id": task_id, "status": states.PENDING, "result": None, "traceback": None}
        ended = view.ended_at is not None and view.state in ENDED_STATES
        return {
            "task_id": task_id,
            "status": CELERY_STATES[view.state],
            "result": self._result(view),
            "traceback": view.traceback,
            "children": None,
            "date_done": aware(view.ended_at) if ended else None,
            "name": view.task,
            "worker": view.worker,
            "retries": view.retries,
            "queue": view.queue,
        }

    def _result(self, view: OperationView) -> Any:
        if view.state in (SUCCEEDED, FAILED, RETRYING) and view.result is not None:
            encoded = Encoded(
                view.result_content_type or "application/data", view.result_content_encoding or "binary", view.result
            )
            return decode_result(self.app, encoded, failed=view.state != SUCCEEDED)
        if view.state == SUCCEEDED:
            return None
        if view.state == FAILED:
            return TaskError(view.error or "failed")
        if view.state == CANCELLED:
            return TaskRevokedError(view.error or "cancelled")
        if view.state == RETRYING:
            return Retry(view.error or "retried", when=_time(view.due_at))
        return waiting_info(view)

    def _store_result(self, task_id: str, _result: Any, state: str, *_: Any, **__: Any) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "Result of task %s (%s) is not kept: durable:// keeps those of durable tasks; give it "
                "base=DurableTask or ignore_result=True, or set another result_backend",
                task_id,
                state,
            )

    def _forget(self, task_id: str) -> None:
        runtime = self._runtime
        with transactions.transaction(runtime, "results.forget") as connection:
            statements(connection, runtime.tables).forget(connection, task_id)

    def _save_group(self, *_: Any) -> Any:
        raise _no_groups()

    def _restore_group(self, *_: Any) -> Any:
        raise _no_groups()

    def _delete_group(self, *_: Any) -> None:
        raise _no_groups()


class UnsetBackend(DurableBackend):
    """What an app has that names no ``result_backend``: Celery's own, which drops results, but that of an operation is
    read from its row, so that ``app.AsyncResult(id)`` serves too."""

    def as_uri(self, *_: Any, **__: Any) -> str:
        """As of Celery's own: a worker's banner shows it."""
        return "disabled://"

    def store_result(self, *_: Any, **__: Any) -> None:
        """Drops it."""

    def ensure_chords_allowed(self) -> None:
        """Refuses them as Celery does."""
        DisabledBackend.ensure_chords_allowed(cast(Any, self))

    def read(self, task_id: str) -> OperationView | None:
        """The operation's row.

        :raises NotImplementedError: there is none, so it may be a plain task's, and nothing keeps those.
        """
        try:
            runtime_of(self.app)
        except ConfigurationError as error:
            raise self._none(task_id) from error
        view = super().read(task_id)
        if view is None:
            raise self._none(task_id)
        return view

    def wait_for(self, task_id: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As :meth:`DurableBackend.wait_for`; raises at once what :meth:`read` raises."""
        self.read(task_id)
        return super().wait_for(task_id, *args, **kwargs)

    def _forget(self, task_id: str) -> None:
        self.read(task_id)
        super()._forget(task_id)

    def _none(self, task_id: str) -> NotImplementedError:
        return NotImplementedError(
            f"result of {task_id!r:.100}: no operation of this service has this ID, and no result backend is "
            "configured that might keep a plain task's: set result_backend"
        )


def register() -> None:
    """Has apps of this process that name no ``result_backend`` use :class:`UnsetBackend`. May be called again."""
    BACKEND_ALIASES["disabled"] = f"{__name__}:{UnsetBackend.__name__}"


class DurableAsyncResult(AsyncResult, Generic[R]):
    """What a durable call returns, at once and with its final ID, before its transaction is committed too."""

    duplicate: bool = False
    """The operation was there already: this call changed nothing."""

    if TYPE_CHECKING:

        def get(self, timeout: float | None = None, propagate: bool = True, **options: Any) -> R: ...

    def revoke(
        self,
        connection: Any = None,
        terminate: bool = False,
        signal: str | None = None,
        wait: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Cancels the operation (:meth:`cancel`). With ``terminate``, also tells the workers to kill its process now,
        which needs the broker; without it, a running attempt is told at its next heartbeat."""
        self.cancel("revoked")
        if terminate or wait:
            super().revoke(connection=connection, terminate=terminate, signal=signal, wait=wait, timeout=timeout)

    def cancel(self, reason: str = "cancelled") -> Cancelled:
        """Ends the operation if it does not run, else asks its worker to stop it. Takes no account's lock.

        In the caller's transaction where :func:`celery_durable.using` is in force.

        :param reason: for people; kept as the operation's error, cut to the setting ``error_bytes_max``.
        :returns: ``cancelled``, ``requested`` (it runs), ``ended`` (before), or ``unknown`` (there is none).
        :raises EnqueueError: the reason is no text.
        """
        if not isinstance(reason, str):
            raise EnqueueError(f"reason = {reason!r:.100}: give a text")
        if not storable(self.id):
            return "unknown"
        self._cache = None
        runtime = runtime_of(self.app)
        reason = bound_text(reason, bytes_max=runtime.settings.error_bytes_max)
        with transactions.transaction(runtime, "results.cancel") as sql:
            return statements(sql, runtime.tables).cancel(sql, self.id, reason, tells=tells(self.app))


def tells(app: Celery) -> bool:
    """Whether a result backend of the app's own, or of one of its tasks, is told how operations end."""
    own = (getattr(task, "_backend", None) for task in app.tasks.values())
    return any(keeps(backend) for backend in (app.backend, *own))


def keeps(backend: Any) -> bool:
    """Whether this is a result backend of an app's or a task's own, which keeps what it is told."""
    return backend is not None and not isinstance(backend, DurableBackend | DisabledBackend)


def durable_backend(app: Celery) -> DurableBackend:
    """The backend that reads the app's operations, whatever its ``result_backend`` is."""
    backend: DurableBackend | None = getattr(app, _ATTRIBUTE, None)
    if backend is None:
        backend = DurableBackend(app)
        setattr(app, _ATTRIBUTE, backend)
    return backend


def waiting_info(view: OperationView) -> dict[str, Any]:
    """``result.info`` of an operation that has not ended: where it is, and why it waits."""
    info: dict[str, Any] = {"state": view.state, "reason": _reason(view), "attempt": view.attempt}
    if view.account is not None:
        info.update(account=view.account, group=view.group)
    if view.state == SCHEDULED:
        info["due_at"] = _time(view.due_at)
    if view.state == RUNNING:
        info.update(hostname=view.worker, started_at=_time(view.started_at))
    if view.cancel_requested_at is not None:
        info["cancel_requested_at"] = _time(view.cancel_requested_at)
    return info


def _reason(view: OperationView) -> str:
    if view.state == SCHEDULED:
        return "eta" if view.attempt == 1 else "retry"
    if view.state == QUEUED:
        return (view.blocked or {}).get(view.group, "permit")
    if view.state == ADMITTED:
        return "sent" if view.sends else "admitted"
    return view.state


def _time(at_ms: int | None) -> str | None:
    at = aware(at_ms)
    return None if at is None else at.isoformat()


def _no_groups() -> NotImplementedError:
    return NotImplementedError(
        "durable:// keeps no saved groups: for GroupResult.save() set result_backend to Redis, or another that does"
    )
