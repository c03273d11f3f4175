"""When the client reports, and what its reports list (design, section 7, step 5)."""

from __future__ import annotations

from collections.abc import Mapping

from celery_durable.permits.messages import WAITING_ONLY_GROUPS_MAX, AccountReport, Ack, ReportGroup
from celery_durable.permits.state import AccountState, GroupCounts, QueueSettings, SentReport

_NO_COUNTS = GroupCounts()


def worth_telling(state: AccountState, counts: Mapping[str, GroupCounts], now_ms: int, settings: QueueSettings) -> bool:
    """Whether the holder could do something with what waits now, by what it was told last and by what it gave.

    A group that has as much as the account's limit, or that was last reported with a demand above it, gains nothing
    by more demand; one that has what it asked for, while the holder names nobody as blocked, frees nothing by less.
    """
    if state.report is None:
        return False
    return (
        _more_waits(state, state.report, counts)
        or _less_is_needed(state, state.report, counts)
        or (_others_could_use(state, state.report, counts) and now_ms >= _next_fall_ms(state, settings))
    )


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
        group, count = state.groups[name], count_of(counts, name)
        if last.demand > group.permits or group.blocked is not None:
            halved = last.demand and last.demand >= 2 * (count.in_use + count.waiting)
            if halved or (last.waiting and not count.waiting):
                return True
    return False


def _others_could_use(state: AccountState, report: SentReport, counts: Mapping[str, GroupCounts]) -> bool:
    """Whether a group needs less than it has and was reported with, by however little, while others wait for it.

    Half of it might lie idle for as long as the rest is used, so that is told too, but at most once in a while.
    """
    for name, last in report.groups.items():
        group, count = state.groups[name], count_of(counts, name)
        if group.blocked is not None and count.in_use + count.waiting < min(last.demand, group.permits):
            return True
    return False


def _next_fall_ms(state: AccountState, settings: QueueSettings) -> int:
    return state.made_at_ms + settings.report_repeat_min_ms


def listed(state: AccountState, counts: Mapping[str, GroupCounts]) -> list[tuple[str, GroupCounts]]:
    """The groups of the next report: all with permits or in use, and of those that only wait the oldest, in turn."""
    held = [name for name, group in state.groups.items() if group.permits]
    held += [name for name, count in counts.items() if count.in_use and name not in state.groups]
    held += [name for name, group in state.groups.items() if not group.permits and count_of(counts, name).in_use]
    known = set(held)
    waiting = [name for name, count in counts.items() if count.waiting and name not in known]
    if len(waiting) > WAITING_ONLY_GROUPS_MAX:
        waiting.sort(key=lambda name: (-counts[name].oldest_wait_ms, name))
        start = state.rotation % len(waiting)
        waiting = (waiting[start:] + waiting[:start])[:WAITING_ONLY_GROUPS_MAX]
    return [(name, count_of(counts, name)) for name in held + waiting]


def some_unlisted(report: SentReport, counts: Mapping[str, GroupCounts]) -> bool:
    """Whether groups wait of which the report did not tell, since there are too many."""
    return any(count.waiting and name not in report.groups for name, count in counts.items())


def message(state: AccountState, report: SentReport, settings: QueueSettings) -> AccountReport:
    """The last report as a message: the same one, the same bytes."""
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


def repeat_due_ms(state: AccountState, counts: Mapping[str, GroupCounts], settings: QueueSettings) -> int | None:
    """When the last report is to be repeated: while unanswered, and while something waits with no permit."""
    if not state.answered:
        longest_ms = settings.report_repeat_max_ms
    elif any(count.waiting and not _permits(state, name) for name, count in counts.items()):
        longest_ms = settings.waiting_repeat_max_ms
    else:
        return None
    return state.sent_at_ms + min(longest_ms, settings.report_repeat_min_ms << min(state.tries, 30))


def lifetime_ms(state: AccountState, counts: Mapping[str, GroupCounts], settings: QueueSettings) -> int:
    """How long a report stands before a new one is made though nothing happened."""
    if any(group.permits for group in state.groups.values()) or any(count.in_use for count in counts.values()):
        return settings.reporting_lifetime_ms // 2
    return settings.daily_report_ms


def next_pass_ms(state: AccountState, counts: Mapping[str, GroupCounts], now_ms: int, settings: QueueSettings) -> int:
    """When the account needs a pass though nothing wakes it."""
    due = [state.made_at_ms + lifetime_ms(state, counts, settings)]
    repeat_ms = repeat_due_ms(state, counts, settings)
    if repeat_ms is not None:
        due.append(repeat_ms)
    if state.report is not None and _others_could_use(state, state.report, counts):
        due.append(_next_fall_ms(state, settings))
    for name, group in state.groups.items():
        if group.permits > count_of(counts, name).in_use:
            due.append(group.used_at_ms + settings.idle_return_ms)
            if group.turn_until_ms is not None:
                due.append(group.turn_until_ms)
    return max(now_ms, min(due))


def _permits(state: AccountState, name: str) -> int:
    group = state.groups.get(name)
    return 0 if group is None else group.permits


def count_of(counts: Mapping[str, GroupCounts], name: str) -> GroupCounts:
    """The group's counts; nothing where the rows say nothing."""
    return counts.get(name, _NO_COUNTS)
