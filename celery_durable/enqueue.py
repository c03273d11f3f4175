"""Writing operations: one row at once, or many in batches. It only inserts, so it is safe inside any transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from celery_durable import scope, transactions
from celery_durable.declaration import Declaration, Resolved
from celery_durable.errors import DuplicateOperationError, EnqueueError
from celery_durable.runtime import Runtime, runtime_of
from celery_durable.store.operations import BATCH_BYTES, NewOperation, statements, statements_for
from celery_durable.worker import left_over

if TYPE_CHECKING:
    from celery import Celery

    from celery_durable.message import CapturedMessage
    from celery_durable.task import DurableTask


@dataclass(frozen=True, slots=True)
class Enqueued:
    """What ``enqueue_many`` did."""

    ids: tuple[str, ...]
    """The operations' IDs, one a call, in the calls' order."""
    duplicates: tuple[str, ...]
    """Those of them that were there already, with the same arguments: nothing changed for them."""

    @property
    def count(self) -> int:
        """How many operations are new."""
        return len(self.ids) - len(self.duplicates)


def new_operation(captured: CapturedMessage, resolved: Resolved, declaration: Declaration) -> NewOperation:
    """The rows of one call."""
    policy = {
        "requeue_after_s": declaration.requeue_after_s,
        "max_worker_losses": declaration.max_worker_losses,
        "limit": resolved.limit,
        "group_limit": resolved.group_limit,
        "mutex": resolved.mutex or None,
    }
    retention_s = declaration.retention_s
    return NewOperation(
        id=captured.id,
        task=captured.task,
        queue=captured.queue,
        content_type=captured.content_type,
        content_encoding=captured.content_encoding,
        body=captured.body,
        digest=captured.digest,
        headers=captured.headers,
        properties=captured.properties,
        publish=captured.publish,
        policy={key: value for key, value in policy.items() if value is not None},
        account=resolved.account,
        group=resolved.group,
        limit=resolved.limit,
        group_limit=resolved.group_limit,
        mutex=resolved.mutex,
        priority=captured.priority,
        retries=captured.retries,
        eta_delay_ms=captured.eta_delay_ms,
        eta_at_ms=captured.eta_at_ms,
        expires_delay_ms=captured.expires_delay_ms,
        expires_at_ms=captured.expires_at_ms,
        retention_ms=None if retention_s is None else round(retention_s * 1000),
    )


def insert(app: Celery, new: NewOperation, *, own_id: bool) -> bool:
    """Writes one operation, in the caller's transaction where there is one. True: the ID was there already.

    :param own_id: the ID was made for this call, so nobody else can have written it.
    :raises DuplicateOperationError: the ID was there with another task or other arguments. Not while Celery publishes
        the callbacks and the next steps of a chain: a parent that ran again may well give its child other arguments,
        and there the first row wins (case D15).
    """
    runtime = runtime_of(app)
    callback = _publishes_callbacks()
    if callback:
        left_over.end_after_body()
    try:
        if scope.must_wait():
            transactions.defer(runtime, new)
            return False
        if scope.in_callers_transaction():
            with transactions.transaction(runtime, "enqueue.one") as connection:
                if own_id and transactions.collect(runtime, connection, new):
                    return False
                return statements(connection, runtime.tables).insert(connection, new)
        return _insert_alone(runtime, new, own_id)
    except DuplicateOperationError:
        if callback:
            return True
        raise


def _insert_alone(runtime: Runtime, new: NewOperation, own_id: bool) -> bool:
    if runtime.database.dialect == "postgresql" and transactions.is_own(runtime) and _inserted_at_once(runtime, new):
        _ring(runtime, [new])
        return False
    for is_last in (False, True):
        try:
            with _one_insert(runtime) as connection:
                known = statements(connection, runtime.tables).insert(connection, new)
            break
        except DBAPIError as error:
            # The pool's connection was cut (the server restarted, an idle timeout). The insert may have happened or
            # not: under the same ID a second one changes nothing.
            if is_last or not error.connection_invalidated:
                raise
    _ring(runtime, [new])
    return known and not own_id


def _ring(runtime: Runtime, committed: Sequence[NewOperation]) -> None:
    for has_account in {one.account is not None for one in committed}:
        runtime.bell.ring("passes" if has_account else "delivery")


def _inserted_at_once(runtime: Runtime, new: NewOperation) -> bool:
    """The short way to the same end, without SQLAlchemy. False: it did not go that way, or nobody knows."""
    database = runtime.database
    try:
        with transactions.database_errors(runtime), database.driver_write("enqueue.one") as driver_connection:
            return statements_for(runtime.tables, "postgresql", psycopg=True).insert_raw(driver_connection, new)
    except database.driver_error:  # what is wrong is found again on the long way, and told as SQLAlchemy does
        return False


@contextmanager
def _one_insert(runtime: Runtime) -> Iterator[Connection]:
    # On PostgreSQL it is one statement, atomic by itself: autocommit saves the round trips of BEGIN and COMMIT.
    database = runtime.database
    alone = database.one_write if database.dialect == "postgresql" else database.transaction
    with transactions.database_errors(runtime), alone("enqueue.one") as connection:
        transactions.require_own(runtime, connection)
        yield connection


def enqueue_many(
    task: DurableTask[..., Any], calls: Iterable[Any], *, batch_rows: int, progress: Callable[[int], object] | None
) -> Enqueued:
    """See :meth:`celery_durable.task.DurableTask.enqueue_many`."""
    if isinstance(batch_rows, bool) or not isinstance(batch_rows, int) or batch_rows < 1:
        raise EnqueueError(f"batch_rows = {batch_rows!r:.100}: give a whole number from 1 up")
    if progress is not None and not callable(progress):
        raise EnqueueError(f"progress = {progress!r:.100}: give a callable that takes how many calls were written")
    runtime = runtime_of(task.app)
    ids: list[str] = []
    duplicates: list[str] = []
    try:
        for batch in _batches((task.prepare_call(call) for call in calls), batch_rows):
            known = _write_batch(runtime, batch)
            ids += [new.id for new in batch]
            duplicates += known
            if not scope.in_callers_transaction():
                _ring(runtime, batch)
            if progress is not None:
                progress(len(ids))
    except Exception as error:
        if not scope.in_callers_transaction():
            error.add_note(
                f"enqueue_many: {len(ids) - len(duplicates)} operations of batches before this one are committed"
            )
        raise
    return Enqueued(tuple(ids), tuple(duplicates))


def _write_batch(runtime: Runtime, batch: Sequence[NewOperation]) -> list[str]:
    if scope.must_wait():
        for new in batch:
            transactions.defer(runtime, new)
        return []
    with transactions.transaction(runtime, "enqueue.many") as connection:
        return statements(connection, runtime.tables).insert_many(connection, batch)


def _batches(operations: Iterator[NewOperation], rows: int) -> Iterator[list[NewOperation]]:
    batch: list[NewOperation] = []
    size = 0
    for new in operations:
        batch.append(new)
        size += len(new.body)
        if len(batch) >= rows or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _publishes_callbacks() -> bool:
    # Celery sets this exactly while it publishes links and a chain's next step. It is private: without it, such a
    # second enqueue raises instead.
    from celery.app import amqp

    flag = getattr(amqp, "_callback_publish_retry", None)
    return bool(flag is not None and flag.get())
