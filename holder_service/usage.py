"""One account as people see it, from its state alone (``holder-service accounts``). As pure as the decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holder_service.account import AccountState
from holder_service.footprint import footprint, wants_ack
from holder_service.semaphore import SemaphoreSettings, limit_in_force


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
        clients=clients,
    )
