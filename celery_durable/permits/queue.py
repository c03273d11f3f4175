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
    ReportGroup,
)
from celery_durable.permits.state import AccountState, GroupState, SentGroup, SentReport

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
class QueueSettings:
    """Times of the client's protocol, in ms, and where each comes from (section 7)."""

    client_id: str
    incarnation: str
    idle_return_ms: int = 20_000
    report_repeat_min_ms: int = 1_000
    report_repeat_max_ms: int = 30_000
    waiting_repeat_max_ms: int = 600_000
    reporting_lifetime_ms: int = 600_000
    daily_report_ms: int = 86_400_000
    waiting_count_max: int = 1_000


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """What the rows say of one group, read while the account's lock is held. ``waiting`` is capped by the shell."""

    in_use: int = 0
    waiting: int = 0
    oldest_wait_ms: int = 0


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


def restored_account(account: str) -> AccountState:
    """The state of an account whose database was restored: permits 0, and a report that says so, even of nothing."""
    return AccountState(account, must_report=True)


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
        state = replace(restored_account(state.account), declared=state.declared)
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
    blocked = {each.group: each.reason for each in reply.blocked}
    for name, group in groups.items():
        group.blocked = blocked.get(name)
    return replace(
        state,
        ack=position,
        limit=state.limit if reply.account_limit is None else reply.account_limit.limit,
        answered=state.answered or (state.report is not None and reply.answers >= state.report.seq),
    )


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
            after[name] = GroupCounts(before.in_use + number, before.waiting - number, before.oldest_wait_ms)
    fell = _give_back(groups, after, now_ms, settings)
    reported = {} if plan.state.report is None else plan.state.report.groups
    for name in [name for name, group in groups.items() if name not in reported and _is_empty(group, after.get(name))]:
        del groups[name]
    state = replace(plan.state, groups=groups)
    wants = plan.asked or fell or state.must_report or _worth_telling(state, after)
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
    if wants or state.report is None or now_ms >= state.made_at_ms + _lifetime_ms(state, after, settings):
        return replace(outcome, wants_seq=True)
    repeat_at_ms = _repeat_at_ms(state, after, settings)
    if repeat_at_ms is not None and now_ms >= repeat_at_ms:
        if state.answered and _some_unlisted(state.report, after):
            turned = replace(state, rotation=state.rotation + WAITING_ONLY_GROUPS_MAX)
            return replace(outcome, state=turned, wants_seq=True)
        return _repeated(outcome, state.report, settings)
    if plan.asked_again and now_ms >= state.sent_at_ms + settings.report_repeat_min_ms:
        return _repeated(outcome, state.report, settings)
    due_at_ms = _due_at_ms(state, after, now_ms, settings)
    if idle and state.answered:
        due_at_ms = min(due_at_ms, now_ms + settings.report_repeat_min_ms)
    return replace(outcome, due_at_ms=due_at_ms)


def seal(outcome: Outcome, seq: int, settings: QueueSettings) -> Outcome:
    """The outcome with its new report, numbered ``seq``, which must have been drawn while the lock was held."""
    state, counts = outcome.state, outcome.counts
    groups: dict[str, GroupState] = {}
    sent: dict[str, SentGroup] = {}
    for name, count in _listed(state, counts):
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
        report=_message(sealed, report, settings),
        due_at_ms=_due_at_ms(sealed, counts, outcome.now_ms, settings),
    )


def _give_back(
    groups: Mapping[str, GroupState], counts: Mapping[str, GroupCounts], now_ms: int, settings: QueueSettings
) -> bool:
    """Gives back what is free of ended turns, used up ceilings and idle leases. Says whether any group's reach fell."""
    fell = False
    for name, group in groups.items():
        in_use = _count(counts, name).in_use
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


def _worth_telling(state: AccountState, counts: Mapping[str, GroupCounts]) -> bool:
    """Whether the holder could do something with what waits now, by what it was told last and by what it gave.

    A group that has as much as the account's limit, or that was last reported with a demand above it, gains nothing
    by more demand; one that has what it asked for, while the holder names nobody as blocked, frees nothing by less.
    """
    if state.report is None:
        return False
    return _more_waits(state, state.report, counts) or _less_is_needed(state, state.report, counts)


def _more_waits(state: AccountState, report: SentReport, counts: Mapping[str, GroupCounts]) -> bool:
    limit = state.limit
    room_for_more = sum(1 for group in report.groups.values() if not group.in_use) < WAITING_ONLY_GROUPS_MAX
    for name, count in counts.items():
        last = report.groups.get(name)
        if not count.waiting or (last is None and not room_for_more):
            continue
        if last is None:
            return True
        if limit is not None and _permits(state, name) >= limit:
            continue
        rose = count.in_use + count.waiting > last.demand and (limit is None or last.demand < limit)
        if rose or not last.waiting:
            return True
    return False


def _less_is_needed(state: AccountState, report: SentReport, counts: Mapping[str, GroupCounts]) -> bool:
    for name, last in report.groups.items():
        group, count = state.groups[name], _count(counts, name)
        if last.demand > group.permits or group.blocked is not None:
            halved = last.demand and last.demand >= 2 * (count.in_use + count.waiting)
            if halved or (last.waiting and not count.waiting):
                return True
    return False


def _listed(state: AccountState, counts: Mapping[str, GroupCounts]) -> list[tuple[str, GroupCounts]]:
    """The groups of the next report: all with permits or in use, and of those that only wait the oldest, in turn."""
    held = [name for name, group in state.groups.items() if group.permits]
    held += [name for name, count in counts.items() if count.in_use and name not in state.groups]
    held += [name for name, group in state.groups.items() if not group.permits and _count(counts, name).in_use]
    known = set(held)
    waiting = [name for name, count in counts.items() if count.waiting and name not in known]
    if len(waiting) > WAITING_ONLY_GROUPS_MAX:
        waiting.sort(key=lambda name: (-counts[name].oldest_wait_ms, name))
        start = state.rotation % len(waiting)
        waiting = (waiting[start:] + waiting[:start])[:WAITING_ONLY_GROUPS_MAX]
    return [(name, _count(counts, name)) for name in held + waiting]


def _some_unlisted(report: SentReport, counts: Mapping[str, GroupCounts]) -> bool:
    return any(count.waiting and name not in report.groups for name, count in counts.items())


def _message(state: AccountState, report: SentReport, settings: QueueSettings) -> AccountReport:
    return AccountReport(
        client_id=settings.client_id,
        incarnation=settings.incarnation,
        account=state.account,
        seq=report.seq,
        ack=None if report.ack is None else Ack(epoch=report.ack[0], version=report.ack[1]),
        groups=tuple(
            ReportGroup(
                group=name,
                claimed=group.claimed,
                released=group.released,
                waiting=group.waiting,
                oldest_wait_ms=group.oldest_wait_ms,
                keeps=group.keeps,
            )
            for name, group in report.groups.items()
        ),
        declared=state.declared,
    )


def _repeated(outcome: Outcome, report: SentReport, settings: QueueSettings) -> Outcome:
    """The last report once more, byte for byte: an ack never travels with counts taken before it was applied."""
    state = replace(outcome.state, sent_at_ms=outcome.now_ms, tries=outcome.state.tries + 1)
    return replace(
        outcome,
        state=state,
        report=_message(state, report, settings),
        due_at_ms=_due_at_ms(state, outcome.counts, outcome.now_ms, settings),
    )


def _repeat_at_ms(state: AccountState, counts: Mapping[str, GroupCounts], settings: QueueSettings) -> int | None:
    """When the last report is to be repeated: while unanswered, and while something waits with no permit."""
    if not state.answered:
        longest_ms = settings.report_repeat_max_ms
    elif any(count.waiting and not _permits(state, name) for name, count in counts.items()):
        longest_ms = settings.waiting_repeat_max_ms
    else:
        return None
    return state.sent_at_ms + min(longest_ms, settings.report_repeat_min_ms << min(state.tries, 30))


def _lifetime_ms(state: AccountState, counts: Mapping[str, GroupCounts], settings: QueueSettings) -> int:
    """How long a report stands before a new one is made though nothing happened."""
    if any(group.permits for group in state.groups.values()) or any(count.in_use for count in counts.values()):
        return settings.reporting_lifetime_ms // 2
    return settings.daily_report_ms


def _due_at_ms(state: AccountState, counts: Mapping[str, GroupCounts], now_ms: int, settings: QueueSettings) -> int:
    due = [state.made_at_ms + _lifetime_ms(state, counts, settings)]
    repeat_at_ms = _repeat_at_ms(state, counts, settings)
    if repeat_at_ms is not None:
        due.append(repeat_at_ms)
    for name, group in state.groups.items():
        if group.permits > _count(counts, name).in_use:
            due.append(group.used_at_ms + settings.idle_return_ms)
            if group.turn_until_ms is not None:
                due.append(group.turn_until_ms)
    return max(now_ms, min(due))


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


def _permits(state: AccountState, name: str) -> int:
    group = state.groups.get(name)
    return 0 if group is None else group.permits


def _count(counts: Mapping[str, GroupCounts], name: str) -> GroupCounts:
    return counts.get(name, _NO_COUNTS)


_NO_COUNTS = GroupCounts()
