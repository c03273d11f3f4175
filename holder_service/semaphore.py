"""The holder's decisions about one account, without I/O, clock or randomness (design, sections 8, 9 and 10).

The shell (``holder_service.service``) loads the account's state, calls :func:`decide` once per batch with the
account's messages in order and a version that it drew from the database's counter, writes the new state by
compare-and-set, and stages the replies, all in one transaction.

What a message changes is in ``intake.py``, what counts against the limit in ``footprint.py``, who gets how much in
``allocation.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from celery_durable.permits import limits
from celery_durable.permits.messages import (
    AccountLimit,
    AccountReply,
    AccountReport,
    Blocked,
    Command,
    LimitMirror,
    Reason,
    ReplyGroup,
)
from holder_service.account import AccountState, Client, Pair
from holder_service.allocation import Allocation, Terms
from holder_service.footprint import held, show, wants_ack
from holder_service.intake import Refusal, Work, begin_epoch, counted_nothing, forfeit, forget_forfeits, take
from holder_service.mirrors import take_over

__all__ = [
    "AccountState",
    "Decision",
    "Refusal",
    "Rules",
    "SemaphoreSettings",
    "decide",
    "go",
    "limit_in_force",
    "new_account",
    "new_epoch",
    "rebuilding_account",
]


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits that the holder's configuration sets: by whole account, by name (the part before ``:``), or ``*``."""

    accounts: Mapping[str, int] = field(default_factory=dict)
    group_limits: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SemaphoreSettings:
    """Times of the holder's protocol, in ms, and sizes (sections 2, 8 and 9)."""

    claim_window_ms: int = 10_000
    claim_window_max_ms: int = 600_000
    turn_ms: int = 200
    turn_max_ms: int = 1_000
    fresh_ms: int = 5_000
    lease_extra_max: int = 16
    repeat_min_ms: int = 1_000
    repeat_max_ms: int = 30_000
    unclaimed_repeat_max_ms: int = 600_000
    reporting_lifetime_ms: int = 600_000
    forfeit_after_ms: int | None = None
    rules: Rules = field(default_factory=Rules)


@dataclass(frozen=True, slots=True)
class Decision:
    """The account after a batch."""

    state: AccountState
    changed: bool = False
    """False: nothing to write, the version was not used."""
    replies: Sequence[AccountReply] = ()
    due_at_ms: int | None = None
    delete: bool = False
    """Nothing held and nothing waiting: the row goes."""
    refusals: Sequence[Refusal] = ()
    mirror: LimitMirror | None = None
    """The account's commands changed: the new mirror for the limits topic, and for the table of limits, which
    outlives the account's row."""
    warnings: Sequence[str] = ()
    """For the log; each names the account."""


def new_account(account: str, epoch: int, mirror: LimitMirror | None = None) -> AccountState:
    """An account without a row, in the database's epoch, with the commands that are in force for it."""
    if mirror is None:
        return AccountState(account, epoch)
    return AccountState(
        account,
        epoch,
        limit=mirror.limit,
        group_limits=mirror.group_limits,
        paused=mirror.paused,
        seqs=mirror.seqs,
    )


def rebuilding_account(account: str, epoch: int, mirror: LimitMirror | None = None) -> AccountState:
    """An account that a holder without its database found in the topic.

    It gives nothing until every client seen there has acknowledged ``epoch``, or :func:`go` was called.
    """
    state = new_account(account, epoch, mirror)
    return replace(state, rebuilding=True, seqs=forget_forfeits(dict(state.seqs)))


def new_epoch(state: AccountState, epoch: int, mirror: LimitMirror | None = None) -> AccountState:
    """The account in a new epoch: what it gave counts until each client seen has acknowledged the epoch.

    Commands of ``mirror`` that are newer than the account's own come into force.
    """
    state = begin_epoch(replace(state, rebuilding=True), max(epoch, state.epoch + 1))
    return state if mirror is None else take_over(state, mirror)


def go(state: AccountState) -> AccountState:
    """Stops waiting for clients that have not acknowledged the epoch (``holder-service go``)."""
    if not state.rebuilding and not any(client.unknown for client in state.clients.values()):
        return state
    clients = {}
    for name, known in state.clients.items():
        client = clients[name] = known.copy()
        if client.unknown:
            client.unknown, client.must_ack = False, max(1, client.sent)
    return replace(state, rebuilding=False, clients=clients)


def decide(
    state: AccountState,
    messages: Sequence[AccountReport | Command],
    now_ms: int,
    version: int,
    settings: SemaphoreSettings,
) -> Decision:
    """Applies ``messages`` in order, runs the timers that are due, allocates once. Guarantees the bound.

    ``version`` must be above all that were drawn before. ``state`` is left as it is.
    """
    clients = {name: client.copy() for name, client in state.clients.items()}
    work = Work(state.with_clients(clients), now_ms, version)
    for message in messages:
        take(work, message)
    _run_timers(work, settings)
    limit = _resolve_limit(work, settings)
    allocation = _allocate(work, limit.limit, settings)
    _press(work, allocation)
    replies = _replies(work, allocation, limit, settings)
    _forget_idle(work)
    return _decision(work, replies, settings)


def _decision(work: Work, replies: Sequence[AccountReply], settings: SemaphoreSettings) -> Decision:
    state = work.state
    if work.changed:
        # Only what comes after the end of the topic acknowledges its new epoch: until then others may be found in it.
        rebuilding = state.rebuilding and (
            state.waits_for_epoch or all(client.unknown for client in state.clients.values())
        )
        state = replace(state, version=work.version, rebuilding=rebuilding)
    return Decision(
        state=state,
        changed=work.changed,
        replies=replies,
        due_at_ms=_due_at_ms(state, settings),
        delete=not state.clients,
        refusals=work.refusals,
        mirror=state.mirror if work.mirror_changed else None,
        warnings=work.warnings,
    )


def _run_timers(work: Work, settings: SemaphoreSettings) -> None:
    now_ms = work.now_ms
    for client in work.state.clients.values():
        lost = [pair for pair in client.pairs.values() if pair.offered and now_ms >= pair.offered_until_ms]
        for pair in lost:
            pair.end_grant()
            pair.window_ms = min(settings.claim_window_max_ms, 2 * pair.window_ms)
        if lost:
            forget_demand(client)
            client.must_ack, client.dirty = work.version, True
        silent_ms = now_ms - client.reported_at_ms
        if settings.forfeit_after_ms is not None and silent_ms >= settings.forfeit_after_ms and not client.forfeited:
            forfeit(work, client)
        elif silent_ms >= settings.reporting_lifetime_ms and not client.forfeited:
            order_stop(work, client)
        if lost or client.dirty:
            work.changed = True


def forget_demand(client: Client) -> None:
    """A client that does not claim what it was offered waits for nothing, until it reports again."""
    for pair in client.pairs.values():
        pair.waiting = 0


def order_stop(work: Work, client: Client) -> None:
    """Takes every permit of a silent client back. What it may have in use counts on until it answers (rule 6)."""
    for pair in client.pairs.values():
        show(client, pair, work.version, 0)
    if _asked_in_vain(client):
        client.must_ack = 0
        work.changed = True


def _asked_in_vain(client: Client) -> bool:
    """Whether it is asked for an acknowledgement on which nothing hangs any more, should it stay silent."""
    return bool(client.must_ack) and not client.unknown and counted_nothing(client)


def limit_in_force(state: AccountState, settings: SemaphoreSettings) -> limits.LimitInForce:
    """The account's limit, by its commands, the rules and what its clients declare."""
    declared = [client.declared for client in state.clients.values()]
    return limits.account_limit(state.account, state.limit, settings.rules.accounts, declared)


def group_limits_in_force(state: AccountState, settings: SemaphoreSettings) -> Callable[[str], int | None]:
    """Tells the limit of a group, in the same way; None: it has none."""
    declared = [client.declared for client in state.clients.values()]
    return lambda group: limits.group_limit(
        state.account, group, state.group_limits, settings.rules.group_limits, declared
    )


def _resolve_limit(work: Work, settings: SemaphoreSettings) -> limits.LimitInForce:
    """The limit in force. Every client is told of a new one, since it may have held back its demand."""
    state = work.state
    found = limit_in_force(state, settings)
    if found.warning is not None and (work.mirror_changed or work.declared_changed):
        work.warnings.append(found.warning)
    if found.limit != state.told:
        if state.told is not None:
            for client in state.clients.values():
                client.dirty = True
                client.must_ack = 0 if client.forfeited else work.version
        work.state = replace(state, told=found.limit)
        work.changed = True
    return found


def _allocate(work: Work, limit: int, settings: SemaphoreSettings) -> Allocation:
    state = work.state
    stopped: Reason | None = "new_epoch" if state.waits_for_epoch else "paused" if state.paused else None
    terms = Terms(
        limit=0 if stopped else limit,
        stopped=stopped,
        group_limit=group_limits_in_force(state, settings),
        now_ms=work.now_ms,
        version=work.version,
        turn_ms=settings.turn_ms,
        turn_max_ms=settings.turn_max_ms,
        fresh_ms=settings.fresh_ms,
        lease_extra_max=settings.lease_extra_max,
        claim_window_ms=settings.claim_window_ms,
    )
    allocation = Allocation(state.clients, terms)
    allocation.run()
    return allocation


def _press(work: Work, allocation: Allocation) -> None:
    """Asks clients once for what they need now, when others begin to wait for what they have."""
    pressed = {seat.client_id for seat in allocation.seats if allocation.pressed(seat)}
    for name, client in work.state.clients.items():
        if client.pressed == (name in pressed):
            continue
        client.pressed = not client.pressed
        work.changed = True
        if client.pressed and client.reported_at_ms < work.now_ms:
            client.dirty, client.must_ack = True, work.version


def _replies(
    work: Work, allocation: Allocation, limit: limits.LimitInForce, settings: SemaphoreSettings
) -> list[AccountReply]:
    blocked: dict[str, list[Blocked]] = {}
    for seat in allocation.seats:
        reason = allocation.blocked(seat)
        if reason is not None:
            blocked.setdefault(seat.client_id, []).append(Blocked(group=seat.group, reason=reason))
    told = AccountLimit(limit=limit.limit, in_use=allocation.account.used, source=limit.source)
    replies = []
    for name, client in work.state.clients.items():
        if client.dirty or not client.sent:
            client.dirty, client.sent, client.tries, client.repeat_at_ms = False, work.version, 0, 0
            work.changed = True
        elif client.repeat_at_ms and work.now_ms >= client.repeat_at_ms:
            client.tries, client.repeat_at_ms = client.tries + 1, 0
            work.changed = True
        elif name not in work.answer:
            continue
        wanted = wants_ack(client)
        if not wanted or client.forfeited:
            work.changed = work.changed or client.repeat_at_ms != 0
            client.repeat_at_ms = client.tries = 0
        elif not client.repeat_at_ms:
            client.repeat_at_ms = work.now_ms + _repeat_ms(client, settings)
            work.changed = True
        replies.append(
            AccountReply(
                client_id=name,
                incarnation=client.incarnation,
                account=work.state.account,
                epoch=work.state.epoch,
                version=client.sent,
                answers=client.seq,
                ack_wanted=wanted,
                groups=_reply_groups(client),
                blocked=tuple(blocked.get(name, ())),
                account_limit=told,
            )
        )
    return replies


def _reply_groups(client: Client) -> tuple[ReplyGroup, ...]:
    groups = []
    for name, pair in client.pairs.items():
        newest = pair.newest
        if newest.permits or pair.offered:
            groups.append(
                ReplyGroup(
                    group=name,
                    permits=newest.permits,
                    claims=newest.claims,
                    turn_ms=newest.turn_ms,
                    offered=pair.offered,
                )
            )
    return tuple(groups)


def _repeat_ms(client: Client, settings: SemaphoreSettings) -> int:
    only_offers = not client.must_ack and not client.unknown and any(pair.offered for pair in client.pairs.values())
    longest_ms = settings.unclaimed_repeat_max_ms if only_offers else settings.repeat_max_ms
    return min(longest_ms, settings.repeat_min_ms << min(client.tries, 30))


def _forget_idle(work: Work) -> None:
    """Drops pairs and clients that hold nothing and wait for nothing. A forfeited client may come back: it stays."""
    clients = work.state.clients
    for name, client in list(clients.items()):
        idle = [group for group, pair in client.pairs.items() if _is_idle(client, pair)]
        for group in idle:
            del client.pairs[group]
        if not client.pairs and not client.unknown and not client.must_ack:
            del clients[name]
        if idle or name not in clients:
            work.changed = True


def _is_idle(client: Client, pair: Pair) -> bool:
    """Nothing is held or wanted. While the client is asked about a lost grant, the pair keeps its next claim window."""
    lost_a_grant = bool(pair.window_ms and client.must_ack)
    return not (pair.offered or pair.waiting or held(pair) or lost_a_grant)


def _due_at_ms(state: AccountState, settings: SemaphoreSettings) -> int | None:
    due = []
    for client in state.clients.values():
        if client.repeat_at_ms:
            due.append(client.repeat_at_ms)
        due += [pair.offered_until_ms for pair in client.pairs.values() if pair.offered]
        if client.forfeited:
            continue
        if settings.forfeit_after_ms is not None:
            due.append(client.reported_at_ms + settings.forfeit_after_ms)
        if _asked_in_vain(client) or any(pair.newest.permits for pair in client.pairs.values()):
            due.append(client.reported_at_ms + settings.reporting_lifetime_ms)
    return min(due, default=None)
