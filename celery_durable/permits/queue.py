"""The client's decisions about one account, without I/O, clock or randomness (design, sections 7 and 8).

The shell (``celery_durable.dispatcher.passes``) locks the account's row, reads the counts while it holds the lock,
and goes through three calls in one transaction:

1. :func:`plan` applies the reply at hand and says how many operations of each group may be admitted;
2. the shell admits up to that many rows and calls :func:`finish` with what it really admitted;
3. where the outcome ``wants_seq``, the shell draws one and calls :func:`seal`, then stages the report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from celery_durable.permits.limits import merge_declared
from celery_durable.permits.messages import (
    WAITING_ONLY_GROUPS_MAX,
    AccountReply,
    AccountReport,
    Ack,
    Declared,
    Reason,
    ReplyGroup,
)
from celery_durable.permits.reporting import (
    count_of,
    lifetime_ms,
    listed,
    message,
    next_pass_ms,
    repeat_due_ms,
    some_unlisted,
    worth_telling,
)
from celery_durable.permits.state import AccountState, GroupCounts, GroupState, QueueSettings, SentGroup, SentReport

__all__ = [
    "AccountState",
    "GroupCounts",
    "Outcome",
    "Plan",
    "QueueSettings",
    "finish",
    "new_account",
    "plan",
    "restored_account",
    "seal",
]

HOLDER_SILENT_MS = 5_000
"""After so long without an answer, what people see is that the holder is silent."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What :func:`plan` decided: at most ``admit[group]`` operations of each group may be admitted now."""

    state: AccountState
    admit: Mapping[str, int] = field(default_factory=dict)
    restored: int | None = None
    """A reply answers this ``seq``, above all that this database drew: it was restored. The shell moves its
    counter of ``seq`` past it before it draws one (section 8, "A client restored from a backup")."""
    asked: bool = False
    """A new report is due: the reply was applied and wants to be acknowledged, or the declaration changed."""
    asked_again: bool = False
    """The reply brought nothing new and asks all the same: the last report may have been lost."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The account after a pass."""

    state: AccountState
    wants_seq: bool = False
    report: AccountReport | None = None
    """The report to stage, replacing an unsent one. A repeat is here at once; a new one after :func:`seal`."""
    due_at_ms: int | None = None
    """When the account needs its next pass without a wake (repeat, idle return, end of a turn)."""
    delete: bool = False
    """Nothing waits, is in use or leased, and the last report is answered: the row goes."""
    blocked: Mapping[str, Reason] = field(default_factory=dict)
    """Why each group that still waits waits."""
    ack: Ack | None = None
    counts: Mapping[str, GroupCounts] = field(default_factory=dict)
    """The counts after this pass's admissions, of which the report will tell."""
    now_ms: int = 0


def new_account(account: str) -> AccountState:
    """The state of an account that has no row: every group starts with permits 0 and keeps 0."""
    return AccountState(account)


def restored_account(state: AccountState) -> AccountState:
    """The account after its database was restored: permits 0, and a report that says so, even of nothing.

    Only what the code declares is as true as before.
    """
    return AccountState(state.account, declared=state.declared, must_report=True)


def plan(
    state: AccountState,
    counts: Mapping[str, GroupCounts],
    reply: AccountReply | None,
    declared: Declared | None,
    now_ms: int,
    settings: QueueSettings,
    *,
    seq_newest: int | None = None,
) -> Plan:
    """Applies ``reply`` and ``declared`` and says what may be admitted. ``seq_newest``: the highest seq ever drawn.

    A reply for another client, incarnation or account is ignored. Guarantees that what it lets in, together with
    what is in use, stays within what the holder counts for this client.
    """
    if reply is not None and (reply.client_id, reply.incarnation, reply.account) != (
        settings.client_id,
        settings.incarnation,
        state.account,
    ):
        reply = None
    restored = None
    if reply is not None and seq_newest is not None and reply.answers > seq_newest:
        restored = reply.answers
        state = restored_account(state)
    groups = _counted(state, counts)
    known = merge_declared(state.declared, declared) if declared is not None else state.declared
    work = replace(state, groups=groups, declared=known)
    asked = state.report is not None and known != state.declared
    asked_again = False
    if reply is not None:
        unknown = state.report is None and any(given.permits or given.offered for given in reply.groups)
        work = _applied(work, groups, reply, now_ms)
        if reply.ack_wanted or unknown:
            asked = asked or work.report is None or work.report.ack != work.ack
            asked_again = not asked
    admit = {}
    for name, group in groups.items():
        count = counts.get(name)
        if count is not None and count.waiting and group.permits:
            room = min(count.waiting, group.room(count.in_use, now_ms))
            if room > 0:
                admit[name] = room
    return Plan(work, admit, restored, asked, asked_again)


def _counted(state: AccountState, counts: Mapping[str, GroupCounts]) -> dict[str, GroupState]:
    """A copy of the groups with a record for all that are in use.

    Releases only grow: should more be in use than was claimed (which no shell does), it counts as claimed.
    """
    groups = {name: group.copy() for name, group in state.groups.items()}
    for name, count in counts.items():
        if not count.in_use:
            continue
        group = groups.get(name)
        if group is None:
            group = groups[name] = GroupState.born(_unlisted_since(state, name))
        released = 0
        if state.report is not None and name in state.report.groups:
            released = state.report.groups[name].released
        group.claimed = max(group.claimed, released + count.in_use)
    return groups


def _unlisted_since(state: AccountState, name: str) -> int | None:
    """The report that said, by not listing the group, that the client keeps nothing of it."""
    if state.report is None or name in state.report.groups:
        return None
    return state.report.seq


def _applied(state: AccountState, groups: dict[str, GroupState], reply: AccountReply, now_ms: int) -> AccountState:
    """Applies the reply to ``groups`` (changed in place) and to the state (returned)."""
    position = (reply.epoch, reply.version)
    if state.ack is not None and position < state.ack:
        return state
    # A reply older than the newest one must not lift `keeps` either: its holder may have lived before this one.
    for group in groups.values():
        if group.keeps_seq is not None and reply.answers >= group.keeps_seq:
            group.keeps = group.keeps_seq = None
    if state.ack is None or position > state.ack:
        given = {each.group: each for each in reply.groups}
        for name, each in given.items():
            if name not in groups and each.permits:
                since = _unlisted_since(state, name)
                groups[name] = GroupState() if since is not None and reply.answers >= since else GroupState.born(since)
        for name, group in groups.items():
            _give(group, given.get(name), now_ms)
        if _is_of_a_holder_behind(state, reply) and any(group.permits for group in groups.values()):
            state = replace(state, must_report=True)
            for group in groups.values():
                group.give_back(0)
    blocked = {each.group: each.reason for each in reply.blocked}
    for name, group in groups.items():
        group.blocked = blocked.get(name)
    return replace(
        state,
        ack=position,
        limit=state.limit if reply.account_limit is None else reply.account_limit.limit,
        answered=state.answered or (state.report is not None and reply.answers >= state.report.seq),
    )


def _is_of_a_holder_behind(state: AccountState, reply: AccountReply) -> bool:
    """Whether a holder of a new epoch has not met the newest report, and may still meet older ones that keep less.

    That an earlier holder answered them says nothing of this one: the topic may have been lost with its database.
    """
    new_epoch = state.ack is not None and reply.epoch > state.ack[0]
    return new_epoch and state.report is not None and reply.answers < state.report.seq


def _give(group: GroupState, given: ReplyGroup | None, now_ms: int) -> None:
    """Replaces what the group was given; never by more than the client said it keeps, while that is unanswered."""
    if given is None:
        group.permits, group.claims, group.turn_until_ms = 0, None, None
        return
    group.permits = given.permits if group.keeps is None else min(given.permits, group.keeps)
    group.claims = given.claims
    group.turn_until_ms = None if given.turn_ms is None else now_ms + given.turn_ms
    group.used_at_ms = now_ms


def finish(
    plan: Plan,
    admitted: Mapping[str, int],
    counts: Mapping[str, GroupCounts],
    now_ms: int,
    settings: QueueSettings,
) -> Outcome:
    """Counts ``admitted`` as claims, gives back what is due, and decides about the report. ``counts`` as in plan()."""
    groups = {name: group.copy() for name, group in plan.state.groups.items()}
    after = dict(counts)
    for name, number in admitted.items():
        if number:
            groups[name].claimed += number
            groups[name].used_at_ms = now_ms
            before = counts[name]
            waiting = before.waiting - number
            after[name] = GroupCounts(before.in_use + number, waiting, before.oldest_wait_ms if waiting else 0)
    fell = _give_back(groups, after, now_ms, settings)
    reported = {} if plan.state.report is None else plan.state.report.groups
    for name in [name for name, group in groups.items() if name not in reported and _is_empty(group, after.get(name))]:
        del groups[name]
    state = replace(plan.state, groups=groups)
    wants = plan.asked or fell or state.must_report or worth_telling(state, after, now_ms, settings)
    idle = not any(group.permits for group in groups.values()) and not any(
        count.in_use or count.waiting for count in after.values()
    )
    outcome = Outcome(
        state,
        ack=None if state.ack is None else Ack(epoch=state.ack[0], version=state.ack[1]),
        blocked=_blocked(state, after, now_ms),
        counts=after,
        now_ms=now_ms,
    )
    if idle and not wants:
        if state.report is None or (state.answered and state.report.says_nothing and not plan.asked_again):
            return replace(outcome, delete=True)
        wants = not state.report.says_nothing
    if wants or state.report is None or now_ms >= state.made_at_ms + lifetime_ms(state, after, settings):
        return replace(outcome, wants_seq=True)
    return _repeat_if_due(outcome, state.report, settings, asked=plan.asked_again)


def _repeat_if_due(outcome: Outcome, report: SentReport, settings: QueueSettings, *, asked: bool) -> Outcome:
    """The last report once more, byte for byte: an ack never travels with counts taken before it was applied.

    Where more groups wait than a report lists, an answered one is not repeated: the next ones have their turn.
    """
    state, counts, now_ms = outcome.state, outcome.counts, outcome.now_ms
    due_ms = repeat_due_ms(state, counts, settings)
    due = due_ms is not None and now_ms >= due_ms
    if due and state.answered and some_unlisted(report, counts):
        turned = replace(state, rotation=state.rotation + WAITING_ONLY_GROUPS_MAX)
        return replace(outcome, state=turned, wants_seq=True)
    again_ms = state.sent_at_ms + settings.report_repeat_min_ms
    if due or (asked and now_ms >= again_ms):
        state = replace(state, sent_at_ms=now_ms, tries=state.tries + 1)
        outcome = replace(outcome, state=state, report=message(state, report, settings))
    next_ms = next_pass_ms(state, counts, now_ms, settings)
    if asked and report.says_nothing and state.answered:
        next_ms = min(next_ms, max(now_ms, again_ms))
    return replace(outcome, due_at_ms=next_ms)


def seal(outcome: Outcome, seq: int, settings: QueueSettings) -> Outcome:
    """The outcome with its new report, numbered ``seq``, which must have been drawn while the lock was held."""
    state, counts = outcome.state, outcome.counts
    groups: dict[str, GroupState] = {}
    sent: dict[str, SentGroup] = {}
    for name, count in listed(state, counts):
        group = state.groups[name].copy() if name in state.groups else GroupState.born(None)
        if group.keeps is not None:
            group.keeps_seq = seq
        group.level = group.reach(count.in_use)
        groups[name] = group
        released = group.claimed - count.in_use
        sent[name] = SentGroup(group.claimed, released, count.waiting, count.oldest_wait_ms, group.keeps)
    report = SentReport(seq, state.ack, sent)
    sealed = replace(
        state,
        groups=groups,
        report=report,
        answered=False,
        made_at_ms=outcome.now_ms,
        sent_at_ms=outcome.now_ms,
        tries=0,
        must_report=False,
    )
    return replace(
        outcome,
        state=sealed,
        wants_seq=False,
        report=message(sealed, report, settings),
        due_at_ms=next_pass_ms(sealed, counts, outcome.now_ms, settings),
    )


def _give_back(
    groups: Mapping[str, GroupState], counts: Mapping[str, GroupCounts], now_ms: int, settings: QueueSettings
) -> bool:
    """Gives back what is free of ended turns, used up ceilings and idle leases. Says whether any group's reach fell."""
    fell = False
    for name, group in groups.items():
        in_use = count_of(counts, name).in_use
        if group.permits > in_use and (
            group.turn_is_over(now_ms)
            or (group.claims is not None and group.claimed >= group.claims)
            or now_ms >= group.used_at_ms + settings.idle_return_ms
        ):
            group.give_back(in_use)
        reach = group.reach(in_use)
        fell = fell or reach < group.level
        group.level = max(group.level, reach)
    return fell


def _blocked(state: AccountState, counts: Mapping[str, GroupCounts], now_ms: int) -> dict[str, Reason]:
    """Why each waiting group waits. A group that nobody has spoken of yet is not in it."""
    silent = state.report is not None and not state.answered and now_ms >= state.made_at_ms + HOLDER_SILENT_MS
    blocked: dict[str, Reason] = {}
    for name, count in counts.items():
        if not count.waiting:
            continue
        group = state.groups.get(name)
        if group is not None and group.turn_is_over(now_ms):
            blocked[name] = "turn"
        elif group is not None and group.blocked is not None:
            blocked[name] = group.blocked
        elif silent:
            blocked[name] = "holder_silent"
        elif state.answered:
            blocked[name] = "account_limit"
    return blocked


def _is_empty(group: GroupState, count: GroupCounts | None) -> bool:
    return not group.permits and not group.level and (count is None or not (count.in_use or count.waiting))
