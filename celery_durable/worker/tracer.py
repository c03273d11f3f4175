"""Starts an attempt around Celery's tracer, and settles what reached no backend call.

A message whose attempt cannot start (it was delivered twice, or the operation ended) fires no signal, no hook and no
event: its outcome is Celery's ``Ignore``, which is acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from billiard.einfo import ExceptionInfo
from celery import states
from celery.app.trace import TraceInfo, trace_ok_t
from celery.exceptions import Ignore, Reject, Retry, WorkerLostError, WorkerShutdown, WorkerTerminate
from celery.utils.log import get_logger

from celery_durable.store.schema import CANCELLED, RETRYING, SCHEDULED
from celery_durable.worker import left_over, runs, settle
from celery_durable.worker.abort import enter_body, leave_body
from celery_durable.worker.context import context_of
from celery_durable.worker.runs import Run, Stop
from celery_durable.worker.settle import AttemptOver, CancelledOutcome
from celery_durable.worker.start import NotStarted, start

logger = get_logger(__name__)

_SLOT = "_durable_tracer"


class AttemptTracer:
    """Data descriptor for ``__trace__``: wraps whatever tracer Celery builds for the task, whenever it builds it."""

    def __get__(self, task: Any, owner: type | None = None) -> TracedAttempt | None:
        return None if task is None else task.__dict__.get(_SLOT)

    def __set__(self, task: Any, tracer: Callable[..., Any] | None) -> None:
        task.__dict__[_SLOT] = None if tracer is None else TracedAttempt(task, tracer)


class TracedAttempt:
    """A tracer that runs the body only as an attempt that it has started.

    It never raises, whatever the body did, but for SystemExit and KeyboardInterrupt in a pool's child process, which
    Celery's main process takes as the loss of that child, and for a worker's own shutdown.
    """

    def __init__(self, task: Any, tracer: Callable[..., Any]) -> None:
        self._task = task
        self._tracer = tracer

    def __call__(self, uuid: str, args: Any, kwargs: Any, request: dict[str, Any] | None = None) -> Any:
        request = {} if request is None else request
        try:
            run, begun = start(self._task, request)
        except NotStarted as refusal:
            runs.counters["dropped"] += 1
            logger.log(refusal.level, "Task %s[%s] not started: %s", self._task.name, uuid, refusal)
            state = states.REJECTED if isinstance(refusal.outcome, Reject) else states.IGNORED
            return _outcome(state, refusal.outcome)
        heart = context_of(self._task.app).heart
        try:
            try:
                if not heart.in_time(run, begun=begun):
                    run.stop = Stop.LATE
                    raise AttemptOver(run.stop.value, requeue=False)
                # In this order: a soft time limit that comes meanwhile, and never again, is raised here.
                enter_body(run)
                runs.add(run)
                heart.watch(run, begun=begun)
                outcome = self._tracer(uuid, args, kwargs, request)
            except (SystemExit, KeyboardInterrupt) as error:
                return self._exited(run, error)
            except BaseException as error:  # noqa: BLE001 - a refused settle, MemoryError, asyncio.CancelledError
                leave_body(run)
                outcome = _outcome(states.FAILURE, error)
            return self._settled(run, outcome)
        finally:
            left_over.end(run)
            runs.remove(run)

    def _settled(self, run: Run, outcome: Any) -> Any:
        info = outcome.info
        state, retval = (None, None) if info is None else (info.state, info.retval)
        try:
            settle.rest(self._task.app, run, state, retval)
        except Exception as error:  # noqa: BLE001 - not recorded: another attempt owns it, or it is recovered as lost
            return _outcome(states.IGNORED, Ignore(str(error)))
        if not isinstance(retval, AttemptOver):
            return outcome
        if run.state == CANCELLED:
            return _outcome(states.IGNORED, CancelledOutcome(str(retval)))
        if run.state in {RETRYING, SCHEDULED}:
            return _outcome(states.RETRY, Retry(exc=WorkerLostError(str(retval))))
        return _outcome(states.IGNORED, Ignore(str(retval)))

    def _exited(self, run: Run, error: BaseException) -> Any:
        leave_body(run)
        if run.in_child:
            # The main process settles it, when it knows how the child ended: lost, or terminated by a revoke.
            raise error
        why = f"the task raised {error!r}"
        lost = WorkerLostError(why)
        try:
            state = settle.lose(self._task.app, run, why)
        except Exception as refused:  # noqa: BLE001 - as above
            outcome = _outcome(states.IGNORED, Ignore(str(refused)))
        else:
            outcome = _outcome(states.FAILURE, lost) if state == "failed" else _outcome(states.RETRY, Retry(exc=lost))
        if isinstance(error, WorkerShutdown | WorkerTerminate):
            raise error
        return outcome


def _outcome(state: str, error: BaseException) -> Any:
    try:
        raise error
    except BaseException:  # noqa: BLE001 - ExceptionInfo reads the exception that is being handled
        return trace_ok_t(ExceptionInfo(internal=True), TraceInfo(state, error), 0.0, None)
