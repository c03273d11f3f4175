"""Status, usage, cancel and purge by an operation's ID or an account's name alone.

All of it goes to this service's own database, in the caller's transaction where :func:`celery_durable.using` is in
force; so it works while Kafka, the holder and the broker are down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from celery.utils.time import maybe_make_aware

from celery_durable import transactions
from celery_durable.call_options import storable
from celery_durable.errors import EnqueueError
from celery_durable.monitoring import inspect
from celery_durable.monitoring.inspect import Account
from celery_durable.results import DurableAsyncResult, durable_backend
from celery_durable.runtime import app_or_current, runtime_of
from celery_durable.store import recovery
from celery_durable.store.clock import aware
from celery_durable.store.schema import CANCELLED, FAILED, SUCCEEDED
from celery_durable.templates import check_key

if TYPE_CHECKING:
    from celery import Celery

PURGE_ROWS = 1_000
"""Operations that :func:`purge_before` deletes in one transaction, at most."""


_COPIED = ("id", "task", "state", "account", "group", "queue", "priority", "attempt", "retries", "worker", "error")
_TIMES = ("enqueued_at", "due_at", "expires_at", "admitted_at", "started_at", "ended_at", "cancel_requested_at")


@dataclass(frozen=True, slots=True)
class OperationStatus:
    """One operation as its row was. Times are aware, in UTC, by the database's clock; None: not yet, or never."""

    id: str
    task: str
    state: str
    """``scheduled``, ``queued``, ``admitted``, ``running``, ``retrying``, ``succeeded``, ``failed``, ``cancelled``."""
    account: str | None
    group: str
    queue: str
    priority: int
    attempt: int
    """The number of the present or next attempt, from 1; of the last one where it has ended."""
    retries: int
    worker: str | None
    """The hostname of the worker of the present or last attempt."""
    enqueued_at: datetime
    due_at: datetime | None
    """When it is due (``scheduled``, ``retrying``), or is sent again (``admitted``)."""
    expires_at: datetime | None
    admitted_at: datetime | None
    started_at: datetime | None
    """Of the present or last attempt."""
    ended_at: datetime | None
    cancel_requested_at: datetime | None
    reason: str | None
    """Why it waits, in the protocol's word: ``account_limit``, ``group_limit``, ``paused``, ``rate``, ``turn``,
    ``new_epoch``, ``holder_silent``. None: it does not wait for a permit, or the holder has not said yet."""
    summary: str
    """The same for people, for every state."""
    before: int
    """How many queued operations of its account and group come first."""
    error: str | None
    """Type and message of the last failure, or why it was cancelled."""


@dataclass(frozen=True, slots=True)
class Purged:
    """How many operations :func:`purge_before` deleted, by how they had ended."""

    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0

    @property
    def operations(self) -> int:
        """All of them."""
        return self.succeeded + self.failed + self.cancelled


def status(operation_id: str, *, app: Celery | None = None) -> OperationStatus:
    """Where an operation is, since when, and why it waits.

    :param app: whose database; None: the current app.
    :raises OperationNotFound: no operation of this service has this ID, or no more.
    """
    runtime = runtime_of(app_or_current(app))
    with transactions.reading(runtime) as connection:
        row = inspect.find(connection, runtime, operation_id)
        place = inspect.place_of(connection, runtime, row)
    fields: dict[str, Any] = {name: getattr(row, name) for name in _COPIED}
    fields |= {name: aware(getattr(row, name)) for name in _TIMES}
    return OperationStatus(**fields, reason=place.reason, summary=place.summary, before=place.before)


def usage(account: str | None = None, *, app: Celery | None = None) -> Sequence[Account]:
    """What is in use, waiting and permitted in each account, as this service knows it; by name, at most 1,000.

    What other services use there is what the holder said last: ``in_use_everywhere``.

    :param account: this one alone. One that nothing is known of has nothing in use.
    :raises EnqueueError: the account is empty or no text.
    """
    if account is not None:
        check_key("account", account)
    return inspect.accounts(runtime_of(app_or_current(app)), name=account)


def cancel(operation_id: str, reason: str = "cancelled", *, app: Celery | None = None) -> bool:
    """Ends an operation that does not run, and asks the worker of one that runs to stop it.

    :meth:`DurableAsyncResult.cancel` tells which of the two it was.

    :returns: whether it did either; False: it had ended before, or there is none.
    :raises EnqueueError: the reason is no text.
    """
    app = app_or_current(app)
    if not storable(operation_id):
        return False
    result: DurableAsyncResult[object] = DurableAsyncResult(operation_id, backend=durable_backend(app), app=app)
    return result.cancel(reason) in {"cancelled", "requested"}


def purge_before(time: datetime, *, app: Celery | None = None) -> Purged:
    """Deletes operations that ended before ``time``, with results and history, however long they were to be kept.

    What has not ended stays, and what the app's own result backend or an errback is still to be told of. In the
    caller's transaction where :func:`celery_durable.using` is in force; else in transactions of 1,000 operations, so
    that an error leaves what was deleted before it deleted. The same ``task_id`` is a new operation afterwards. A
    message of the old one that is still in the Celery broker could start it, with the old arguments: do not use an ID
    again as long as there may be one.

    :param time: a naive one is taken as UTC, as Celery takes a naive ``eta``.
    :raises EnqueueError: it is no datetime.
    """
    if not isinstance(time, datetime):
        raise EnqueueError(f"time = {time!r:.100}: give a datetime; what ended before it is deleted")
    runtime = runtime_of(app_or_current(app))
    before_ms = round(maybe_make_aware(time).timestamp() * 1000)
    counts: Counter[str] = Counter()
    while True:
        with transactions.transaction(runtime, "results.purge") as connection:
            deleted = recovery.purge(connection, runtime.tables, before_ms, PURGE_ROWS)
        counts.update(deleted)
        if deleted.total() < PURGE_ROWS:
            return Purged(succeeded=counts[SUCCEEDED], failed=counts[FAILED], cancelled=counts[CANCELLED])
