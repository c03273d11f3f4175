"""Runs a client's vector: rows in the neutral form, through plan(), finish() and seal()."""

from __future__ import annotations

import json
from dataclasses import dataclass

from celery_durable.permits import queue
from celery_durable.permits.messages import AccountReport, Declared, Message, read_account_message, read_reply
from celery_durable.permits.queue import AccountState, GroupCounts, QueueSettings
from celery_durable.permits.reporting import message
from celery_durable.permits.state import GroupState, SentGroup, SentReport
from tests.unit.vectors.form import (
    ClientDatabase,
    ClientGroup,
    ClientInput,
    ClientOutput,
    ClientRow,
    Counts,
    Document,
    Position,
)


def wire(body: Message) -> Document:
    """The message as it goes over the wire."""
    document: Document = json.loads(body.to_bytes())
    return document


@dataclass
class Client:
    """A client's database with one account."""

    database: ClientDatabase
    row: ClientRow | None

    def __post_init__(self) -> None:
        self.settings = QueueSettings(self.database.client_id, self.database.incarnation)
        self.seq = self.database.seq_newest

    def run(self, given: ClientInput) -> tuple[ClientRow | None, ClientOutput]:
        """One pass. Keeps and returns the row after it, and what came out."""
        state = self._state()
        sent_before = None if state.report is None else message(state, state.report, self.settings).to_bytes()
        counts = {name: GroupCounts(**count.model_dump()) for name, count in given.counts.items()}
        reply = None if given.reply is None else read_reply(json.dumps(given.reply).encode())
        declared = None if given.declared is None else Declared.model_validate(given.declared)
        plan = queue.plan(state, counts, reply, declared, given.now_ms, self.settings, seq_newest=self.seq)
        if plan.restored is not None:
            self.seq = max(self.seq, plan.restored)
        outcome = queue.finish(plan, plan.admit, counts, given.now_ms, self.settings)
        repeat = outcome.report is not None
        if outcome.wants_seq:
            self.seq += 1
            outcome = queue.seal(outcome, self.seq, self.settings)
        if repeat:
            assert outcome.report is not None
            assert outcome.report.to_bytes() == sent_before, "a repeat is byte for byte what was sent"
        self.row = None if outcome.delete else self._row(outcome.state)
        return self.row, ClientOutput(
            admit=dict(plan.admit),
            report=None if outcome.report is None else wire(outcome.report),
            repeat=repeat,
            due_at_ms=outcome.due_at_ms,
            shown=dict(outcome.blocked),
        )

    def after_admission(self, given: ClientInput, admitted: dict[str, int]) -> dict[str, Counts]:
        """The counts once ``admitted`` are in use."""
        return {
            name: Counts(
                in_use=count.in_use + admitted.get(name, 0),
                waiting=count.waiting - admitted.get(name, 0),
                oldest_wait_ms=count.oldest_wait_ms,
            )
            for name, count in given.counts.items()
        }

    def _state(self) -> AccountState:
        row, account = self.row, self.database.account
        if row is None:
            return queue.new_account(account)
        report = None
        if row.report is not None:
            sent = read_account_message(json.dumps(row.report).encode())
            assert isinstance(sent, AccountReport)
            assert sent.declared == Declared.model_validate(row.declared), "declared: what the last report said"
            report = SentReport(
                sent.seq,
                None if sent.ack is None else (sent.ack.epoch, sent.ack.version),
                {
                    each.group: SentGroup(each.claimed, each.released, each.waiting, each.oldest_wait_ms, each.keeps)
                    for each in sent.groups
                },
            )
        return AccountState(
            account,
            ack=None if row.ack is None else (row.ack.epoch, row.ack.version),
            limit=row.limit,
            declared=Declared.model_validate(row.declared),
            groups={
                name: GroupState(
                    claimed=group.claimed,
                    permits=group.permits,
                    level=group.counted,
                    used_at_ms=group.last_use_ms,
                    keeps=group.keeps,
                    keeps_seq=group.keeps_seq,
                    claims=group.claims,
                    turn_until_ms=group.turn_until_ms,
                    blocked=group.blocked,  # type: ignore[arg-type]
                )
                for name, group in row.groups.items()
            },
            report=report,
            answered=row.answered,
            made_at_ms=row.made_at_ms,
            sent_at_ms=row.sent_at_ms,
            tries=row.repeats,
        )

    def _row(self, state: AccountState) -> ClientRow:
        assert AccountState.from_json(state.to_json()) == state
        return ClientRow(
            ack=None if state.ack is None else Position(epoch=state.ack[0], version=state.ack[1]),
            limit=state.limit,
            declared=state.declared.model_dump(exclude_defaults=True),
            groups={
                name: ClientGroup(
                    claimed=group.claimed,
                    permits=group.permits,
                    counted=group.level,
                    last_use_ms=group.used_at_ms,
                    keeps=group.keeps,
                    keeps_seq=group.keeps_seq,
                    claims=group.claims,
                    turn_until_ms=group.turn_until_ms,
                    blocked=group.blocked,
                )
                for name, group in state.groups.items()
            },
            report=None if state.report is None else wire(message(state, state.report, self.settings)),
            answered=state.answered,
            made_at_ms=state.made_at_ms,
            sent_at_ms=state.sent_at_ms,
            repeats=state.tries,
        )
