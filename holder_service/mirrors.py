"""Merges two copies of an account's commands, as pure as the decisions (design, section 8).

A restored database and the limits topic each hold what was in force at some time. Of each kind and target the copy
that knows the newer command counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from celery_durable.permits.messages import LimitMirror
from holder_service.account import AccountState
from holder_service.intake import forget_forfeits

_KEY = re.compile(r".+?/(SetLimit|Pause|Forfeit)(?:/(.*))?", re.DOTALL)
"""``sender/kind`` or ``sender/kind/target``, as in :attr:`LimitMirror.seqs`."""


def merge(known: LimitMirror, found: LimitMirror) -> LimitMirror:
    """What is in force if both copies are of one account.

    Where each has a command of one kind and target that the other lacks (from two senders), ``found`` counts.
    """
    newer = _newer_in(found.seqs, known.seqs)
    group_limits = dict(known.group_limits)
    for kind, group in newer:
        if kind == "SetLimit" and group is not None:
            group_limits.pop(group, None)
            if group in found.group_limits:
                group_limits[group] = found.group_limits[group]
    return LimitMirror(
        account=known.account,
        limit=found.limit if ("SetLimit", None) in newer else known.limit,
        group_limits=group_limits,
        paused=found.paused if ("Pause", None) in newer else known.paused,
        seqs={key: max(known.seqs.get(key, 0), found.seqs.get(key, 0)) for key in {**known.seqs, **found.seqs}},
    )


def take_over(state: AccountState, found: LimitMirror) -> AccountState:
    """The account with the newer commands of ``found``.

    Forfeits excepted: they change what clients hold, which only their message in the accounts topic can repeat.
    """
    merged = merge(state.mirror, found)
    return replace(
        state,
        limit=merged.limit,
        group_limits=merged.group_limits,
        paused=merged.paused,
        seqs={**state.seqs, **forget_forfeits(merged.seqs)},
    )


def _newer_in(seqs: Mapping[str, int], than: Mapping[str, int]) -> set[tuple[str, str | None]]:
    """Kind and target of the commands whose number is higher in ``seqs``."""
    matches = (_KEY.fullmatch(key) for key, seq in seqs.items() if seq > than.get(key, -1))
    return {(match[1], match[2]) for match in matches if match is not None}
