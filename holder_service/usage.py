"""One account as people see it, from its state alone (``holder-service accounts``). As pure as the decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holder_service.account import AccountState
from holder_service.footprint import footprint, wants_ack
from holder_service.semaphore import SemaphoreSettings, group_limits_in_force, limit_in_force


@dataclass(frozen=True, slots=True)
class ClientUsage:
    """One client in one account, for ``holder-service accounts``."""

    client_id: str
    in_use: int
    waiting: int
    footprint: int
    last_report_ms: int
    """How long ago its newest report came."""
    must_acknowledge: bool


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """One group of an account, over all clients."""

    group: str
    limit: int | None
    """None: the group has no limit of its own."""
    in_use: int
    waiting: int
    footprint: int


@dataclass(frozen=True, slots=True)
class Usage:
    """One account as people see it."""

    account: str
    limit: int
    source: str
    paused: bool
    in_use: int
    waiting: int
    footprint: int
    epoch: int
    version: int
    """With ``epoch``, up to where a forfeit that is made now would free."""
    groups: Sequence[GroupUsage] = ()
    """Those that have a name, or a limit, by name."""
    clients: Sequence[ClientUsage] = ()


def of(state: AccountState, now_ms: int, settings: SemaphoreSettings) -> Usage:
    """What people see of the account."""
    found = limit_in_force(state, settings)
    clients = [
        ClientUsage(
            client_id=name,
            in_use=sum(pair.used for pair in client.pairs.values()),
            waiting=sum(pair.waiting for pair in client.pairs.values()),
            footprint=sum(footprint(client, pair) for pair in client.pairs.values()),
            last_report_ms=max(0, now_ms - client.reported_at_ms),
            must_acknowledge=wants_ack(client),
        )
        for name, client in state.clients.items()
    ]
    return Usage(
        account=state.account,
        limit=found.limit,
        source=found.source,
        paused=state.paused,
        in_use=sum(client.in_use for client in clients),
        waiting=sum(client.waiting for client in clients),
        footprint=sum(client.footprint for client in clients),
        epoch=state.epoch,
        version=state.version,
        groups=_groups(state, settings),
        clients=clients,
    )


def _groups(state: AccountState, settings: SemaphoreSettings) -> list[GroupUsage]:
    names = {group for client in state.clients.values() for group in client.pairs} | state.group_limits.keys()
    found, limit_of = [], group_limits_in_force(state, settings)
    for name in sorted(names):
        limit = limit_of(name)
        if not name and limit is None:
            continue
        pairs = [(client, client.pairs[name]) for client in state.clients.values() if name in client.pairs]
        found.append(
            GroupUsage(
                group=name,
                limit=limit,
                in_use=sum(pair.used for _, pair in pairs),
                waiting=sum(pair.waiting for _, pair in pairs),
                footprint=sum(footprint(client, pair) for client, pair in pairs),
            )
        )
    return found
