"""Settling an attempt: one write by its run token, whatever the body did, repeated while the database is away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from celery import states
from celery.exceptions import Ignore, Reject
from celery.utils.log import get_logger

from celery_durable import outcomes
from celery_durable.outcomes import bound_text, encode_result, error_text
from celery_durable.store.attempts import AlreadySettled, Attempt, Attempts, Ending
from celery_durable.store.schema import SUCCEEDED
from celery_durable.store.untold import Mark
from celery_durable.worker import runs
from celery_durable.worker.abort import leave_body
from celery_durable.worker.context import context_of
from celery_durable.worker.runs import Phase, Run, Stop
from celery_durable.worker.transient import persist

logger = get_logger(__name__)

PATIENCE_S = 300.0
"""How long a settle is tried while the database is away. The body's work is done: waiting loses nothing."""
MAIN_PATIENCE_S = 5.0
"""The same in a worker's main process, which serves all its children; what fails there is recovered as lost."""


class AttemptOver(Reject):
    """Ends Celery's tracer without the outcome that it was about to report: the attempt was stopped.

    A ``Reject``, since the tracer takes any other exception of a backend for the task's failure.
    """


class AttemptRefused(AttemptOver):
    """This attempt's outcome was not recorded, since the operation is no longer its own."""


class CancelledOutcome(Ignore):
    """What the main process is told of an attempt that was cancelled while it ran."""


def succeed(app: Any, run: Run, value: Any, *, result_of: str | None) -> str:
    """Settles as succeeded, unless the body had asked for a retry: then that. Returns the operation's state.

    :param result_of: the task whose result is kept; None: it is not.

    :raises kombu.exceptions.EncodeError: the result cannot be serialised; nothing was written.
    :raises AttemptRefused: the operation is no longer this attempt's.
    """
    leave_body(run)
    if run.state is not None:
        return run.state
    if run.staged is not None:
        return retry(app, run, None, None)
    ending = Ending()
    if result_of is not None:
        encoded = encode_result(app, value, result_of)
        ending = Ending(encoded.content_type, encoded.content_encoding, encoded.data)
    return _write(app, run, lambda attempts: attempts.succeed(run.attempt, ending))


def fail(app: Any, run: Run, error: BaseException, traceback: str | None) -> str:
    """Settles as failed, unless the attempt asked for a retry, was told to stop, or its operation cancelled.

    :raises AttemptRefused: the operation is no longer this attempt's.
    """
    if (state := _settled_or_stopped(app, run)) is not None:
        return state
    if run.staged is not None:
        return retry(app, run, error, traceback)
    ending = failure(app, error, traceback)
    return _write(app, run, lambda attempts: attempts.fail(run.attempt, ending))


def retry(app: Any, run: Run, error: BaseException | None, traceback: str | None) -> str:
    """Settles as retried, with the message that was staged. A retry that was never sent is a failure.

    As lost if the attempt was told to stop: ``autoretry_for`` takes the stop for a failure of the body, but a loss
    costs none of Celery's retries.

    :raises AttemptRefused: the operation is no longer this attempt's.
    """
    if (state := _settled_or_stopped(app, run)) is not None:
        return state
    message = run.staged
    if message is None:
        unsent = RuntimeError(f"Retry was raised but not sent: use self.retry(); its cause was {error!r}")
        return fail(app, run, unsent, traceback)
    delay_ms = message.eta_delay_ms or 0
    requeue = 0 < delay_ms >= run.requeue_after_s * 1000
    ending = texts(app, error, traceback)
    return _write(app, run, lambda attempts: attempts.retry(run.attempt, message, ending, requeue=requeue))


def cancel(app: Any, run: Run, reason: str) -> str:
    """Settles as cancelled.

    :raises AttemptRefused: the operation is no longer this attempt's.
    """
    leave_body(run)
    return _write(app, run, lambda attempts: attempts.cancel(run.attempt, Ending(error=reason)))


def lose(app: Any, run: Run, why: str) -> str:
    """Settles as lost with its worker: counted, capped, and run again.

    :raises AttemptRefused: the operation is no longer this attempt's.
    """
    leave_body(run)
    return _write(app, run, lambda attempts: attempts.lose(run.attempt, why, context_of(app).losses))


def rest(app: Any, run: Run, state: str | None, retval: Any) -> None:
    """Settles what the tracer ended with and no backend call has settled: ``Ignore``, ``Reject``, an ignored retry.

    :raises AttemptRefused: the operation is no longer this attempt's.
    """
    leave_body(run)
    if run.state is not None or run.refused:
        return
    if state == states.RETRY:
        retry(app, run, getattr(retval, "exc", None), None)
    elif isinstance(retval, Reject) and retval.requeue:
        ending = texts(app, retval, None)
        _write(app, run, lambda attempts: attempts.repeat(run.attempt, ending))
    elif isinstance(retval, Ignore):
        # What the app's own result backend has is the body's doing: Celery tells it nothing then.
        run.attempt = replace(run.attempt, tells=False)
        succeed(app, run, None, result_of=None)
    elif isinstance(retval, BaseException):
        fail(app, run, recorded(retval), None)
    else:
        lose(app, run, "its body was skipped as done already, but its operation was not")


def recorded(error: BaseException) -> BaseException:
    """The error as it is recorded: what a ``Reject`` gives as its reason, if that is an exception; never one that is no
    ``Exception``, which would end whoever waits for the result."""
    reason = error.reason if isinstance(error, Reject) else None
    if isinstance(reason, Exception):
        return reason
    return error if isinstance(error, Exception) else RuntimeError(f"The task raised {error!r}")


def settle_from_main(app: Any, attempt: Attempt, write: Callable[[Attempts], str]) -> str | None:
    """Settles an attempt whose process is gone, from the worker's main process.

    Returns the operation's state, or, where the attempt had settled before, as what; None: nobody can tell now.
    """
    context = context_of(app)
    database = context.runtime.database
    what = f"Settle of operation {attempt.id}"
    try:
        return persist(database, lambda: write(context.attempts), patience_s=MAIN_PATIENCE_S, what=what)
    except AlreadySettled as before:
        logger.info("%s", before)
        return before.settled_as
    except Exception as error:  # noqa: BLE001 - its heartbeats have ended: it is recovered as lost
        logger.error("%s: %s: %s; it is recovered when its heartbeats are overdue", what, type(error).__name__, error)
    finally:
        database.dispose()  # the next child that is forked must find no connection
    return None


def told(app: Any, mark: Mark, run: Run | None) -> None:
    """The end that left this mark was told. In a worker's main process (no ``run``) the mark is deleted at once."""
    context = context_of(app)
    if run is not None and run.state == SUCCEEDED:
        context.heart.told(mark)
        return
    # An errback is called once more for each mark that stays: no waiting here.
    try:
        context.attempts.told([mark])
    except Exception as error:  # noqa: BLE001 - what was told is told
        logger.warning("What follows on operation %s may be told twice: %s", mark.operation_id, error)
    finally:
        if run is None:
            context.runtime.database.dispose()  # as above


def failure(app: Any, error: BaseException, traceback: str | None) -> Ending:
    """What a failed attempt leaves: the exception encoded, and texts, bounded."""
    return outcomes.failure(app, error, traceback, bytes_max=context_of(app).runtime.settings.error_bytes_max)


def texts(app: Any, error: BaseException | None, traceback: str | None) -> Ending:
    """What a retried or cancelled attempt leaves: texts for people, bounded."""
    bytes_max = context_of(app).runtime.settings.error_bytes_max
    return Ending(
        error=None if error is None else error_text(error, bytes_max=bytes_max),
        traceback=None if not traceback else bound_text(str(traceback), bytes_max=bytes_max),
    )


def _settled_or_stopped(app: Any, run: Run) -> str | None:
    """The state, if the attempt has settled before or was told to stop, which this settles then; None: neither."""
    leave_body(run)
    if run.state is not None or run.stop is None:
        return run.state
    return cancel(app, run, run.stop.value) if run.stop is Stop.CANCELLED else lose(app, run, run.stop.value)


def _write(app: Any, run: Run, write: Callable[[Attempts], str]) -> str:
    context = context_of(app)
    what = f"Settle of operation {run.attempt.id}"
    try:
        state = persist(context.runtime.database, lambda: write(context.attempts), patience_s=PATIENCE_S, what=what)
    except Exception as error:
        run.refused = True
        runs.counters["refused"] += 1
        logger.warning("%s refused: %s: %s", what, type(error).__name__, str(error).strip())
        raise AttemptRefused(str(error), requeue=False) from error
    run.state = state
    run.phase = Phase.SETTLED
    return state
