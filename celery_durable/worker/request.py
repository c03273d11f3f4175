"""A durable task's message in the worker's main process: it mints the run token, and settles when a child is gone.

Celery reports some ends before the child has ended (a hard time limit, ``revoke(terminate=True)``), and some twice.
Here an operation is settled once, and its permit is free only when nothing runs on.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from typing import Any

from billiard.einfo import ExceptionWithTraceback
from celery import signals
from celery.exceptions import Retry, TaskRevokedError, Terminated, TimeLimitExceeded, WorkerLostError
from celery.utils.log import get_logger
from celery.worker.request import Request
from celery.worker.state import task_ready
from kombu.utils.encoding import safe_repr, safe_str

from celery_durable.crashpoints import crashpoint
from celery_durable.message import RUN_HEADER
from celery_durable.store.attempts import Attempt, Ending
from celery_durable.worker import settle
from celery_durable.worker.context import context_of
from celery_durable.worker.start import attempt_of

logger = get_logger(__name__)

_TERM_S, _KILL_S = 0.1, 2.0
"""How long a child may take to end after SIGTERM, and after SIGKILL."""


class DurableRequest(Request):
    """A message that may start one attempt of an operation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._request_dict[RUN_HEADER] = {"token": uuid.uuid4().hex, "pid": os.getpid()}

    def acknowledge(self) -> None:
        """As Celery's."""
        if not self.acknowledged:
            self._let_errors_through()
            crashpoint("worker.message", "before_acknowledge")
            super().acknowledge()
            crashpoint("worker.message", "after_acknowledge")

    def reject(self, requeue: bool = False) -> None:
        """As Celery's."""
        if not self.acknowledged:
            self._let_errors_through()
            crashpoint("worker.message", "before_acknowledge")
            super().reject(requeue=requeue)
            crashpoint("worker.message", "after_acknowledge")

    def _let_errors_through(self) -> None:
        """Makes an error of this message's acknowledgement to Redis one of the consumer, which connects anew (case C4).

        Celery would log it and go on. kombu's Redis channels count by themselves what is not acknowledged: a worker
        whose whole prefetch count was lost so would never ask for a message again, nor see that its connection is
        gone. A message of a connection before the present one concerns nobody.
        """
        channel = self.message.channel
        # By its name: a worker on another broker need not load the module.
        if type(channel).__module__ == "kombu.transport.redis" and not channel.closed:
            self._connection_errors = ()

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """As Celery's, once the operation's row says how the attempt ended."""
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        if return_ok:
            return self._on_traced(exc_info, error, send_failed_event)
        if self._attempt() is None:
            return super().on_failure(exc_info, send_failed_event, return_ok)
        state = self._settle(error)
        if isinstance(error, Terminated) or state in {"failed", "cancelled"}:
            return super().on_failure(exc_info, send_failed_event, return_ok)
        if state == "succeeded":
            return self._report_success()
        return self._report_retry(exc_info, error)

    def _on_traced(self, exc_info: Any, error: BaseException, send_failed_event: bool) -> Any:
        """The child reported an end that it has settled."""
        if isinstance(error, settle.CancelledOutcome):
            return self._report_cancelled()
        if isinstance(error, MemoryError):
            # Celery raises it again here, which ends the worker. The task has failed, and its row says so.
            return self._report_failure(exc_info)
        return super().on_failure(exc_info, send_failed_event, True)

    def _attempt(self) -> Attempt | None:
        return attempt_of(self._request_dict, self.task, self.errbacks)

    def _settle(self, error: BaseException) -> str | None:
        """Settles an attempt whose process is gone, or is ended here. Returns the state, as far as it is known."""
        app, attempt = self._app, self._attempt()
        if attempt is None:
            return None
        if isinstance(error, TimeLimitExceeded):
            self._end_child()
            ending = settle.failure(app, error, None)
            return settle.settle_from_main(app, attempt, lambda attempts: attempts.fail(attempt, ending))
        if isinstance(error, TaskRevokedError) or (isinstance(error, Terminated) and not self._already_cancelled):
            ending = Ending(error="terminated" if isinstance(error, Terminated) else str(error))
            return settle.settle_from_main(app, attempt, lambda attempts: attempts.revoke(attempt, ending))
        why = str(error) if isinstance(error, WorkerLostError) else f"its process ended: {error!r}"
        return settle.settle_from_main(
            app, attempt, lambda attempts: attempts.lose(attempt, why, context_of(app).losses)
        )

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        if not terminated:
            self._settle(TaskRevokedError(reason))
        super()._announce_revoked(reason, terminated, signum, expired)

    def _success_was_stored(self) -> bool:
        """Never asked anew: the settle has told."""
        return False

    def _retry_worker_lost(self, *_: Any) -> bool:
        """Never by message: a lost operation runs again by its row, up to ``max_worker_losses``."""
        return False

    def _end_child(self) -> None:
        """Ends the child that runs this task, as billiard would a moment later, and sees it gone."""
        for number, patience_s in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _KILL_S)):
            try:
                os.kill(self.worker_pid, number)
            except ProcessLookupError:
                return
            deadline = time.monotonic() + patience_s
            while time.monotonic() < deadline:
                if _is_gone(self.worker_pid):
                    return
                time.sleep(0.005)
        logger.error("Process %s of task %s[%s] does not end after SIGKILL", self.worker_pid, self.name, self.id)

    def _report_success(self) -> None:
        task_ready(self, successful=True)
        self.acknowledge()
        # Without the value: reading it back would open a connection in the process that children are forked from.
        self.send_event("task-succeeded", result=None, runtime=None)

    def _report_retry(self, exc_info: Any, error: BaseException) -> None:
        task_ready(self)
        self.acknowledge()
        task, request = self.task, self._context
        logger.warning(
            "Task %s[%s] lost with its process, its operation says what follows: %r", self.name, self.id, error
        )
        task.backend.mark_as_retry(self.id, error, exc_info.traceback, request=request)
        self.send_event("task-retried", exception=safe_repr(error), traceback=safe_str(exc_info.traceback))
        task.request_stack.push(request)
        try:
            task.on_retry(error, self.id, self.args, self.kwargs, exc_info)
            signals.task_retry.send(sender=task, request=request, reason=Retry(exc=error), einfo=exc_info)
        finally:
            task.request_stack.pop()

    def _report_cancelled(self) -> None:
        task_ready(self)
        self.acknowledge()
        self.send_event("task-revoked", terminated=False, signum=None, expired=False)
        signals.task_revoked.send(sender=self.task, request=self._context, terminated=False, signum=None, expired=False)

    def _report_failure(self, exc_info: Any) -> None:
        task_ready(self)
        self.acknowledge()
        self.send_event("task-failed", exception=safe_repr(exc_info.exception), traceback=safe_str(exc_info.traceback))


def _is_gone(pid: int) -> bool:
    try:
        # WNOWAIT: its exit status stays for the pool to collect.
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
