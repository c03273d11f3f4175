"""The result backend of a durable task: it settles attempts in SQL, reads results there, and forwards both ways.

What is settled is told to the app's own result backend too, unless that is ``durable://``: chords, and code that waits
there, go on as for a plain task. In a worker's main process it only forwards: there the request settles, when the child
is gone. In a dispatcher too: it tells what whoever ended the operation has not told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import states
from celery.utils.log import get_logger

from celery_durable.crashpoints import crashpoint
from celery_durable.message import GENERATION_HEADER, RUN_HEADER
from celery_durable.results import DurableBackend, keeps
from celery_durable.store.schema import CANCELLED, FAILED, RETRYING, SCHEDULED, SUCCEEDED
from celery_durable.store.untold import Mark
from celery_durable.worker import runs, settle
from celery_durable.worker.runs import Run, Stop

logger = get_logger(__name__)


class SettlingBackend(DurableBackend):
    """One durable task's backend."""

    def __init__(self, task: Any) -> None:
        super().__init__(app=task.app, url="durable://")
        self._task = task

    @property
    def forward_to(self) -> Any:
        """The backend that the app or the task's ``backend=`` names; None where that is this one's kind."""
        target = self._task._backend
        if target is None:
            target = self._task.app.backend
        return None if isinstance(target, DurableBackend) else target

    @property
    def tells(self) -> bool:
        """Whether there is such a backend, and it keeps what it is told."""
        return keeps(self.forward_to)

    def mark_as_done(
        self, task_id: str, result: Any, request: Any = None, store_result: bool = True, state: str = states.SUCCESS
    ) -> None:
        """Settles as succeeded, or as retried if the body asked for that."""
        run = runs.of_request(request)
        if run is not None:
            ignored = not store_result or getattr(request, "ignore_result", False)
            # A chord is given what its members return, whatever else becomes of it.
            keep = not ignored or bool(getattr(request, "chord", None))
            state_after = settle.succeed(self.app, run, result, result_of=self._task.name if keep else None)
            self._end_if_cancelled(state_after, task_id, request)
            if state_after != SUCCEEDED:
                self._forward_retry(run, task_id, None, None, request)
                return
        self._forward(
            run,
            request,
            lambda target: target.mark_as_done(task_id, result, request, store_result, state),
            lambda: super(SettlingBackend, self).mark_as_done(task_id, result, request, False, state),
        )

    def mark_as_failure(
        self,
        task_id: str,
        exc: Any,
        traceback: Any = None,
        request: Any = None,
        store_result: bool = True,
        call_errbacks: bool = True,
        state: str = states.FAILURE,
    ) -> None:
        """Settles as failed; as retried, cancelled or lost where that is what ended the attempt."""
        run = runs.of_request(request)
        if run is not None:
            state_after = settle.fail(self.app, run, settle.recorded(exc), traceback)
            self._end_if_cancelled(state_after, task_id, request)
            if state_after in {RETRYING, SCHEDULED}:
                self._forward_retry(run, task_id, exc, traceback, request)
                if run.stop is not None:
                    raise settle.AttemptOver(run.stop.value, requeue=False)
                return
        self._forward(
            run,
            request,
            lambda target: target.mark_as_failure(task_id, exc, traceback, request, store_result, call_errbacks, state),
            lambda: super(SettlingBackend, self).mark_as_failure(
                task_id, exc, traceback, request, False, call_errbacks, state
            ),
        )

    def mark_as_retry(
        self,
        task_id: str,
        exc: Any,
        traceback: Any = None,
        request: Any = None,
        store_result: bool = True,  # noqa: ARG002 - Celery's signature; it stores retries whatever this says
        state: str = states.RETRY,  # noqa: ARG002
    ) -> None:
        """Settles as retried, with the message that ``self.retry()`` made."""
        run = runs.of_request(request)
        if run is not None:
            state_after = settle.retry(self.app, run, exc, traceback)
            self._end_if_cancelled(state_after, task_id, request)
            if state_after == FAILED:
                self.mark_as_failure(task_id, exc, traceback, request)
                return
        self._forward_retry(run, task_id, exc, traceback, request)

    def mark_as_revoked(
        self,
        task_id: str,
        reason: Any = "",
        request: Any = None,
        store_result: bool = True,
        state: str = states.REVOKED,
    ) -> None:
        """Forwards a revocation; the worker's main process has settled it."""
        self._forward(
            runs.of_request(request),
            request,
            lambda target: target.mark_as_revoked(task_id, reason, request, store_result, state),
            lambda: super(SettlingBackend, self).mark_as_revoked(task_id, reason, request, False, state),
        )

    def store_result(
        self, task_id: str, result: Any, state: str, traceback: Any = None, request: Any = None, **kwargs: Any
    ) -> Any:
        """Forwards states of the task's own, and ``STARTED``: the row tells those by itself."""
        target = self.forward_to
        if target is not None:
            target.store_result(task_id, result, state, traceback=traceback, request=request, **kwargs)
        return result

    def add_to_chord(self, chord_id: str, result: Any) -> Any:
        """Forwards: chords are counted in the app's result backend."""
        target = self.forward_to
        return super().add_to_chord(chord_id, result) if target is None else target.add_to_chord(chord_id, result)

    def process_cleanup(self) -> None:
        """Cleans up the backend that is forwarded to."""
        target = self.forward_to
        if target is not None:
            target.process_cleanup()

    def _end_if_cancelled(self, state: str, task_id: str, request: Any) -> None:
        if state == CANCELLED:
            self.mark_as_revoked(task_id, Stop.CANCELLED.value, request)
            raise settle.AttemptOver(Stop.CANCELLED.value, requeue=False)

    def _forward_retry(self, run: Run | None, task_id: str, exc: Any, traceback: Any, request: Any) -> None:
        self._forward(
            run,
            request,
            lambda target: target.mark_as_retry(task_id, exc, traceback, request=request),
            lambda: None,
            ended=False,
        )

    def _forward(
        self,
        run: Run | None,
        request: Any,
        forward: Callable[[Any], None],
        without: Callable[[], None],
        *,
        ended: bool = True,
    ) -> None:
        """Tells the outcome once, also of an attempt whose outcome Celery reports twice (hard time limit).

        The outcome is settled: an error here must not turn it into another one.
        """
        header = getattr(request, RUN_HEADER, None)
        if run is not None:
            if run.forwarded:
                return
            run.forwarded = True
        elif isinstance(header, dict):
            if header.get("forwarded"):
                return
            header["forwarded"] = True
        target = self.forward_to
        try:
            if target is None:
                without()
            else:
                crashpoint("worker.outcome", "before_publish")
                forward(target)
                crashpoint("worker.outcome", "after_publish")
        except Exception:
            if run is None and header is None:
                raise
            later = "; a dispatcher will" if ended else ""
            logger.exception("Outcome of %s is in SQL, but the app's result backend was not told%s", request.id, later)
            return
        if ended:
            self._told(run, request)

    def _told(self, run: Run | None, request: Any) -> None:
        if run is not None:
            if run.state is not None and run.attempt.marks(run.state):
                settle.told(self.app, Mark(run.attempt.id, run.attempt.generation), run)
        elif getattr(request, RUN_HEADER, None) is not None:
            settle.told(self.app, Mark(request.id, int(getattr(request, GENERATION_HEADER, None) or 1)), None)
