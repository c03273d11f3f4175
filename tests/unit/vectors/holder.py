"""Runs a holder's vector: rows in the neutral form, through decide()."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from celery_durable.permits.messages import Declared, LimitMirror, read_account_message
from holder_service import semaphore
from holder_service.account import AccountState, Client, Entry, Pair, Standing
from holder_service.footprint import footprint
from holder_service.semaphore import SemaphoreSettings
from tests.unit.vectors import form
from tests.unit.vectors.client import wire
from tests.unit.vectors.form import HolderClient, HolderDatabase, HolderGroup, HolderInput, HolderOutput, HolderRow


@dataclass
class Holder:
    """The holder's database with one account: its row, and the commands, which outlive it."""

    database: HolderDatabase
    row: HolderRow | None
    mirror: LimitMirror | None = None
    settings: SemaphoreSettings = field(default_factory=SemaphoreSettings)

    def run(self, given: HolderInput) -> tuple[HolderRow | None, HolderOutput]:
        """One decision. Keeps and returns the row after it, and what came out."""
        account = self.database.account
        if self.row is None:
            state = semaphore.new_account(account, self.database.epoch, self.mirror)
        else:
            state = _state(account, self.row)
        messages = [read_account_message(json.dumps(message).encode()) for message in given.messages]
        decision = semaphore.decide(state, messages, given.now_ms, given.version, self.settings)
        if not decision.changed:
            assert decision.state == state
        if decision.mirror is not None:
            self.mirror = decision.mirror
        self.row = None if decision.delete else _row(decision.state)
        return self.row, HolderOutput(
            replies=[wire(reply) for reply in decision.replies],
            footprint={
                name: sum(footprint(client, pair) for pair in client.pairs.values())
                for name, client in decision.state.clients.items()
            },
            due_at_ms=decision.due_at_ms,
            mirror=None if decision.mirror is None else wire(decision.mirror),
            refused=[refusal.reason for refusal in decision.refusals],
            warnings=len(decision.warnings),
        )


def _state(account: str, row: HolderRow) -> AccountState:
    return AccountState(
        account,
        row.epoch,
        version=row.version,
        clients={name: _client(client) for name, client in row.clients.items()},
        limit=row.commands.limit,
        group_limits=row.commands.group_limits,
        paused=row.commands.paused,
        seqs=row.commands.seqs,
        told=row.told,
        rebuilding=row.rebuilding,
    )


def _client(client: HolderClient) -> Client:
    return Client(
        client.incarnation,
        seq=client.seq,
        reported_at_ms=client.reported_at_ms,
        declared=Declared.model_validate(client.declared),
        pairs={name: _pair(group) for name, group in client.groups.items()},
        sent=client.sent,
        must_ack=client.must_ack or 0,
        unknown=client.unknown,
        forfeited=client.forfeited,
        pressed=client.pressed,
        standing=None if client.standing is None else Standing(**client.standing.model_dump()),
        repeat_at_ms=client.repeat_at_ms or 0,
        tries=client.repeats,
    )


def _pair(group: HolderGroup) -> Pair:
    pair = Pair(
        claimed=group.claimed,
        used=group.in_use,
        waiting=group.waiting,
        served=group.served,
        entries=[Entry(**entry.model_dump()) for entry in group.entries],
        window_ms=group.window_ms or 0,
        turn_ms=group.turn_ms or 0,
        turn_claimed=group.turn_claimed,
    )
    if group.offer is not None:
        pair.offered, pair.offered_version = group.offer.permits, group.offer.version
        pair.offered_until_ms = group.offer.until_ms
    return pair


def _row(state: AccountState) -> HolderRow:
    assert AccountState.from_json(state.to_json()) == state
    return HolderRow(
        epoch=state.epoch,
        version=state.version,
        told=state.told,
        rebuilding=state.rebuilding,
        commands=form.Commands(
            limit=state.limit, group_limits=dict(state.group_limits), paused=state.paused, seqs=dict(state.seqs)
        ),
        clients={
            name: HolderClient(
                incarnation=client.incarnation,
                seq=client.seq,
                reported_at_ms=client.reported_at_ms,
                declared=client.declared.model_dump(exclude_defaults=True),
                sent=client.sent,
                must_ack=client.must_ack or None,
                unknown=client.unknown,
                forfeited=client.forfeited,
                pressed=client.pressed,
                standing=None if client.standing is None else form.Standing(**client.standing._asdict()),
                repeat_at_ms=client.repeat_at_ms or None,
                repeats=client.tries,
                groups={name: _group(pair) for name, pair in client.pairs.items()},
            )
            for name, client in state.clients.items()
        },
    )


def _group(pair: Pair) -> HolderGroup:
    return HolderGroup(
        claimed=pair.claimed,
        in_use=pair.used,
        waiting=pair.waiting,
        served=pair.served,
        entries=[form.Entry(**entry._asdict()) for entry in pair.entries],
        offer=form.Offer(permits=pair.offered, version=pair.offered_version, until_ms=pair.offered_until_ms)
        if pair.offered
        else None,
        window_ms=pair.window_ms or None,
        turn_ms=pair.turn_ms or None,
        turn_claimed=pair.turn_claimed,
    )
