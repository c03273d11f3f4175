"""What an operator asks of one service's database: which operations there are, why one waits, who holds the permits.

Reads only, and only this service's database: the holder's part comes from its newest reply, which every account's
row keeps. So it works while Kafka, the holder and the broker are down, and says what was known last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Select, Table, func, select, union_all

from celery_durable import transactions
from celery_durable.call_options import storable
from celery_durable.errors import DurableError, OperationNotFound
from celery_durable.monitoring.reasons import NOTHING, Known, Waiting, describe_reason, load_known, short_reason
from celery_durable.permits.messages import AccountLimit
from celery_durable.permits.state import AccountState
from celery_durable.store.clock import now_ms
from celery_durable.store.schema import (
    ADMITTED,
    CANCELLED,
    ENDED_STATES,
    FAILED,
    PERMIT_STATES,
    QUEUED,
    RETRYING,
    RUNNING,
    SCHEDULED,
    STATES,
    SUCCEEDED,
)
from celery_durable.store.sql import in_states, parts

if TYPE_CHECKING:
    from celery_durable.runtime import Runtime

HOLDERS_MAX = 20
"""Operations listed that have a permit, at most."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation as ``ps`` shows it. Times are seconds from now, by the database's clock."""

    id: str
    task: str
    state: str
    account: str | None
    group: str
    queue: str
    priority: int
    attempt: int
    worker: str | None
    age_s: float
    """Since it was enqueued."""
    state_s: float | None
    """Since it started (running) or ended; None where no time is kept."""
    due_s: float | None
    """Until it is due (scheduled, retrying) or sent again (admitted); negative: overdue."""
    error: str | None
    why: str
    """Why it is in this state, in a few words."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One failed, retried or lost attempt of an operation's history."""

    attempt: int
    outcome: str
    worker: str | None
    ended_s: float
    error: str | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why one operation is where it is (case G1)."""

    operation: Operation
    reason: str | None
    """The protocol's word: ``account_limit``, ``group_limit``, ``paused``, …; None: not blocked, or not yet known."""
    summary: str
    before: int
    """Queued operations of the same account and group that come first; 0 unless it is queued."""
    limit: AccountLimit | None
    """The account's limit, how much of it all services use, and where it comes from; None: no reply yet."""
    in_use: int
    """Permits that this service's operations hold in the account."""
    permits_held_by: Sequence[Operation]
    """Those operations, the oldest first, at most :data:`HOLDERS_MAX`."""
    attempts: Sequence[Attempt]


@dataclass(frozen=True, slots=True)
class AccountGroup:
    """One group of an account."""

    group: str
    permits: int
    """How many operations this service may have in use here at once."""
    in_use: int
    waiting: int
    reason: str | None
    declared_limit: int | None = None
    """What this service's code declares; a rule of the holder, a command or another service may say less."""


@dataclass(frozen=True, slots=True)
class Account:
    """One account as this service knows it."""

    account: str
    limit: int | None
    """Of the account over all services; None: the holder has not said it yet."""
    source: str | None
    """Where the limit comes from: ``declared``, ``default``, ``command``, or a rule."""
    in_use_everywhere: int | None
    """By all services, as the holder said last."""
    in_use: int
    """By this service, now."""
    waiting: int
    """Queued by this service."""
    scheduled: int
    """Not due yet, of this service."""
    oldest_wait_s: float | None
    """Since the oldest queued one was enqueued; None: none waits."""
    groups: Sequence[AccountGroup]


def ps(
    runtime: Runtime,
    *,
    account: str | None = None,
    states: Collection[str] = (),
    limit: int = 100,
) -> list[Operation]:
    """Operations in the order they were enqueued; without ``states``, those that have not ended.

    :raises DurableError: a state that does not exist.
    """
    for state in states:
        if state not in STATES:
            raise DurableError(f"state = {state!r}: there is no such state; use {', '.join(STATES)}")
    operations = runtime.tables.operations
    wanted = states or [state for state in STATES if state not in ENDED_STATES]
    statement = _operations(runtime).where(in_states(operations, wanted)).order_by(operations.c.order_no).limit(limit)
    if account is not None:
        statement = statement.where(operations.c.account == account)
    with transactions.reading(runtime) as connection:
        rows = connection.execute(statement).all()
        known = load_known(connection, runtime.tables, {row.account for row in rows if row.account is not None})
    return [_operation(row, known.get(row.account, NOTHING)) for row in rows]


def why(runtime: Runtime, operation_id: str) -> Explanation:
    """Everything that explains where the operation is.

    :raises OperationNotFound: no operation has this ID.
    """
    with transactions.reading(runtime) as connection:
        row = find(connection, runtime, operation_id)
        place = place_of(connection, runtime, row)
        in_use, permitted = (0, ()) if row.account is None else _permitted(connection, runtime, row.account)
        attempts = _attempts(connection, runtime, row)
    return Explanation(
        operation=_operation(row, place.known),
        reason=place.reason,
        summary=place.summary,
        before=place.before,
        limit=place.known.limit,
        in_use=in_use,
        permits_held_by=[_operation(each, place.known) for each in permitted],
        attempts=attempts,
    )


def find(connection: Connection, runtime: Runtime, operation_id: str) -> Any:
    """The operation's row, with the database's time as ``now``.

    :raises OperationNotFound: no operation has this ID.
    """
    operations = runtime.tables.operations
    row = None
    if storable(operation_id):
        row = connection.execute(_operations(runtime).where(operations.c.id == operation_id)).one_or_none()
    if row is None:
        raise OperationNotFound(
            f"operation {operation_id!r:.300}: none in this service's database; it was never enqueued here, is not "
            "committed yet, or was deleted after its end"
        )
    return row


@dataclass(frozen=True, slots=True)
class Place:
    """Where one operation is, and why."""

    reason: str | None
    """As in :class:`Explanation`, and so are the next two."""
    summary: str
    before: int
    known: Known


def place_of(connection: Connection, runtime: Runtime, row: Any) -> Place:
    """Where the operation of this row is."""
    known = NOTHING
    if row.account is not None:
        known = load_known(connection, runtime.tables, {row.account}).get(row.account, NOTHING)
    if row.state != QUEUED:
        return Place(None, short_reason(row, known), 0, known)
    reason, before = known.blocked.get(row.group), _before(connection, runtime, row)
    waiting = Waiting(
        account=row.account, group=row.group, reason=reason, limit=known.limit, offered=known.offered(row.group),
        before=before,
    )  # fmt: skip
    return Place(reason, describe_reason(waiting), before, known)


def accounts(runtime: Runtime, *, limit: int = 1_000, name: str | None = None) -> list[Account]:
    """The accounts with anything in use, waiting or leased, by name; at most ``limit``.

    :param name: this one alone, also where nothing is in use, waiting or leased there.
    """
    operations, rows = runtime.tables.operations, runtime.tables.accounts
    # Three, each with the predicate of an index that has no ended operations.
    kinds = (
        (in_states(operations, PERMIT_STATES),),
        (in_states(operations, (QUEUED,)),),
        (in_states(operations, (SCHEDULED, RETRYING)), operations.c.state == SCHEDULED),
    )
    live = union_all(*(_counts(operations, *conditions, name=name) for conditions in kinds))
    with transactions.reading(runtime) as connection:
        counted: dict[str, list[Any]] = {}
        for row in connection.execute(live):
            counted.setdefault(row.account, []).append(row)
        chosen = [] if name is None else [name]
        if name is None:
            leased = connection.scalars(select(rows.c.account).order_by(rows.c.account).limit(limit))
            chosen = sorted({*counted, *leased})[:limit]
        known = load_known(connection, runtime.tables, chosen)
        declared = _group_limits(connection, runtime, chosen)
    return [_account(each, counted.get(each, ()), known.get(each, NOTHING), declared.get(each)) for each in chosen]


def _counts(operations: Table, *conditions: Any, name: str | None) -> Select[Any]:
    columns = operations.c
    statement = select(
        columns.account,
        columns.group,
        columns.state,
        func.count().label("count"),
        func.min(columns.enqueued_at).label("oldest"),
        now_ms().label("now"),
    ).where(columns.account.is_not(None), *conditions)
    if name is not None:
        statement = statement.where(columns.account == name)
    return statement.group_by(columns.account, columns.group, columns.state)


def _group_limits(connection: Connection, runtime: Runtime, names: Sequence[str]) -> dict[str, int | None]:
    """The limit of each group that has a name, as this service declares it."""
    rows, found = runtime.tables.accounts, {}
    for some in parts(names):
        for name, state in connection.execute(select(rows.c.account, rows.c.state).where(rows.c.account.in_(some))):
            found[name] = AccountState.from_json(state).declared.group_limit
    return found


def _operations(runtime: Runtime) -> Any:
    return select(runtime.tables.operations, now_ms().label("now"))


def _permitted(connection: Connection, runtime: Runtime, account: str) -> tuple[int, Sequence[Any]]:
    operations = runtime.tables.operations
    holding = (operations.c.account == account, in_states(operations, PERMIT_STATES))
    count = connection.execute(select(func.count()).select_from(operations).where(*holding)).scalar_one()
    statement = _operations(runtime).where(*holding).order_by(operations.c.order_no).limit(HOLDERS_MAX)
    return count, connection.execute(statement).all()


def _before(connection: Connection, runtime: Runtime, row: Any) -> int:
    operations = runtime.tables.operations
    statement = (
        select(func.count())
        .select_from(operations)
        .where(
            operations.c.account == row.account,
            operations.c.group == row.group,
            in_states(operations, (QUEUED,)),
            (operations.c.priority > row.priority)
            | ((operations.c.priority == row.priority) & (operations.c.order_no < row.order_no)),
        )
    )
    return int(connection.execute(statement).scalar_one())


def _attempts(connection: Connection, runtime: Runtime, row: Any) -> list[Attempt]:
    attempts = runtime.tables.attempts
    statement = (
        select(attempts)
        .where(attempts.c.operation_id == row.id, attempts.c.generation == row.generation)
        .order_by(attempts.c.no)
    )
    return [
        Attempt(found.attempt, found.outcome, found.worker, (row.now - found.ended_at) / 1000, found.error)
        for found in connection.execute(statement)
    ]


def _operation(row: Any, known: Known) -> Operation:
    since = {RUNNING: row.started_at, SUCCEEDED: row.ended_at, FAILED: row.ended_at, CANCELLED: row.ended_at}
    return Operation(
        id=row.id,
        task=row.task,
        state=row.state,
        account=row.account,
        group=row.group,
        queue=row.queue,
        priority=row.priority,
        attempt=row.attempt,
        worker=row.worker,
        age_s=(row.now - row.enqueued_at) / 1000,
        state_s=_seconds(row.now, since.get(row.state)),
        due_s=None
        if row.due_at is None or row.state not in (SCHEDULED, ADMITTED, RETRYING)
        else (row.due_at - row.now) / 1000,
        error=row.error,
        why=short_reason(row, known),
    )


def _account(name: str, rows: Iterable[Any], known: Known, group_limit: int | None) -> Account:
    in_use: dict[str, int] = {}
    waiting: dict[str, int] = {}
    scheduled, oldest_s = 0, None
    for row in rows:
        if row.state in PERMIT_STATES:
            in_use[row.group] = in_use.get(row.group, 0) + row.count
        elif row.state == QUEUED:
            waiting[row.group] = row.count
            oldest_s = max(oldest_s or 0.0, (row.now - row.oldest) / 1000)
        else:
            scheduled += row.count
    permits = {group.group: group.permits for group in known.reply.groups} if known.reply else {}
    groups = [
        AccountGroup(
            group,
            permits.get(group, 0),
            in_use.get(group, 0),
            waiting.get(group, 0),
            known.blocked.get(group),
            group_limit if group else None,
        )
        for group in sorted({*in_use, *waiting, *permits})
    ]
    return Account(
        account=name,
        limit=known.limit.limit if known.limit else None,
        source=known.limit.source if known.limit else None,
        in_use_everywhere=known.limit.in_use if known.limit else None,
        in_use=sum(in_use.values()),
        waiting=sum(waiting.values()),
        scheduled=scheduled,
        oldest_wait_s=oldest_s,
        groups=groups,
    )


def _seconds(now: int, since: int | None) -> float | None:
    return None if since is None else (now - since) / 1000
