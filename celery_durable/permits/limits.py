"""Which limit is in force: what code declares, what the holder is configured with, what was commanded (section 10)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from celery_durable.permits.messages import Declared

DEFAULT_LIMIT = 1
"""The limit of an account for which nobody says anything."""
MUTEX_LIMIT = 1


@dataclass(frozen=True, slots=True)
class LimitInForce:
    """The limit in force and where it comes from."""

    limit: int
    source: str
    """``command``, ``rule <key>``, ``declared``, ``mutex`` or ``default``."""
    warning: str | None = None
    """What was ignored, naming both sides: a command or rule that would make a mutex more than 1."""


def merge_declared(first: Declared | None, second: Declared | None) -> Declared:
    """Both declarations in one: the smaller limits, the mutex if either says so, the slower rate."""
    if first is None or first == second:
        return second if second is not None else Declared()
    if second is None:
        return first
    rates = [declared.rate for declared in (first, second) if declared.rate is not None]
    return Declared(
        limit=_smallest((first.limit, second.limit)),
        group_limit=_smallest((first.group_limit, second.group_limit)),
        mutex=first.mutex or second.mutex,
        rate=min(rates, key=lambda rate: (rate.tokens / rate.per_ms, rate.burst)) if rates else None,
    )


def rule_for(rules: Mapping[str, int], account: str) -> tuple[str, int] | None:
    """The configured rule that fits ``account``: the whole account, then its name (before ``:``), then ``*``."""
    if not rules:
        return None
    for key in (account, account.partition(":")[0], "*"):
        if key in rules:
            return key, rules[key]
    return None


def account_limit(
    account: str, commanded: int | None, rules: Mapping[str, int], declared: Iterable[Declared]
) -> LimitInForce:
    """The account's limit: a command, a rule, the smallest declared, or 1; never above 1 where it is a mutex."""
    declared = tuple(declared)
    rule = rule_for(rules, account)
    if commanded is not None:
        found = LimitInForce(commanded, "command")
    elif rule is not None:
        found = LimitInForce(rule[1], f"rule {rule[0]}")
    else:
        smallest = _smallest(each.limit for each in declared)
        found = LimitInForce(DEFAULT_LIMIT, "default") if smallest is None else LimitInForce(smallest, "declared")
    if found.limit <= MUTEX_LIMIT or not any(each.mutex for each in declared):
        return found
    if found.source == "declared":
        return LimitInForce(MUTEX_LIMIT, "mutex")
    return LimitInForce(
        MUTEX_LIMIT,
        "mutex",
        f"account {account!r}: limit {found.limit} from {found.source} is ignored, since the code declares the account"
        f" a mutex, which is never more than {MUTEX_LIMIT}; take the limit away, or the mutex in the code",
    )


def group_limit(
    account: str, group: str, commanded: Mapping[str, int], rules: Mapping[str, int], declared: Iterable[Declared]
) -> int | None:
    """The limit of one group of the account: a command for it, a rule, the smallest declared, or none.

    Operations without a group (``""``) have none, unless a command names it: they are no workflow that could be full.
    """
    if group in commanded or not group:
        return commanded.get(group)
    rule = rule_for(rules, account)
    if rule is not None:
        return rule[1]
    return _smallest(each.group_limit for each in declared)


def _smallest(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)
