"""Both pure cores with the least shells that they need, in virtual time and without chance of their own.

Each shell keeps its states as JSON, as the real ones do, and draws its numbers from counters that never restart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from celery_durable.permits import queue
from celery_durable.permits.messages import (
    AccountReply,
    AccountReport,
    Command,
    Declared,
    LimitMirror,
    read_account_message,
    read_limit_mirror,
    read_reply,
)
from celery_durable.permits.queue import GroupCounts, QueueSettings
from holder_service import semaphore
from holder_service.footprint import footprint
from holder_service.semaphore import Decision, SemaphoreSettings
from tests.invariants import Invariants, Pair

ACCOUNT = "tenant:acme"


@dataclass(frozen=True)
class Operation:
    """One operation: when it was enqueued, and how long it runs."""

    number: int
    group: str
    enqueued_ms: int
    duration_ms: int


@dataclass
class ClientShell:
    """One client's database and dispatcher: the rows of operations, and the account's row as JSON."""

    name: str
    invariants: Invariants
    declared: Declared = field(default_factory=Declared)
    incarnation: str = "first"
    seq: int = 0
    row: str | None = None
    lives: int = 0
    """How often the row was deleted."""
    due_at_ms: int | None = None
    waiting: dict[str, list[Operation]] = field(default_factory=lambda: defaultdict(list))
    running: dict[int, Operation] = field(default_factory=dict)
    blocked: dict[str, str] = field(default_factory=dict)
    settings: QueueSettings = field(init=False)

    def __post_init__(self) -> None:
        self.settings = QueueSettings(self.name, self.incarnation)

    def in_use(self) -> dict[str, int]:
        """Operations that hold a permit, by group."""
        counts: dict[str, int] = defaultdict(int)
        for operation in self.running.values():
            counts[operation.group] += 1
        return counts

    def counts(self, now_ms: int) -> dict[str, GroupCounts]:
        """What the shell reads while it holds the row's lock."""
        used = self.in_use()
        most = self.settings.waiting_count_max
        return {
            group: GroupCounts(used.get(group, 0), min(len(rows), most), now_ms - rows[0].enqueued_ms if rows else 0)
            for group in sorted({*used, *self.waiting})
            if (rows := self.waiting.get(group, [])) or used.get(group, 0)
        }

    def run_pass(
        self,
        now_ms: int,
        reply: AccountReply | None = None,
        admits: Callable[[str, int], int] = lambda _group, most: most,
    ) -> tuple[bytes | None, list[Operation]]:
        """One pass. Returns the report to stage, and what was admitted. ``admits``: how many rows are not locked."""
        state = queue.new_account(ACCOUNT) if self.row is None else queue.AccountState.from_json(self.row)
        before = state.to_json()
        counts = self.counts(now_ms)
        declared = self.declared if counts else None
        plan = queue.plan(state, counts, reply, declared, now_ms, self.settings, seq_newest=self.seq)
        if plan.restored is not None:
            self.seq = max(self.seq, plan.restored)
        admitted = []
        numbers = {}
        for group, most in plan.admit.items():
            numbers[group] = admits(group, most)
            for operation in self.waiting[group][: numbers[group]]:
                self.running[operation.number] = operation
                admitted.append(operation)
            del self.waiting[group][: numbers[group]]
        outcome = queue.finish(plan, numbers, counts, now_ms, self.settings)
        for group, number in numbers.items():
            if number:
                given = plan.state.groups[group]
                self.invariants.claim(
                    (self.name, group),
                    in_use=counts[group].in_use + number,
                    permits=given.permits,
                    claimed=outcome.state.groups[group].claimed,
                    claims=given.claims,
                )
        if outcome.wants_seq:
            self.seq += 1
            outcome = queue.seal(outcome, self.seq, self.settings)
        assert state.to_json() == before, "plan() or finish() changed the state that it was given"
        self.due_at_ms = outcome.due_at_ms
        self.blocked = dict(outcome.blocked)
        if outcome.ack is not None:
            # A row that is made again begins anew, and starts from permits 0.
            self.invariants.grows("ack", f"{self.name}, row {self.lives}", (outcome.ack.epoch, outcome.ack.version))
        if outcome.delete:
            self.row, self.due_at_ms = None, None
            self.lives += 1
            assert outcome.report is None
        else:
            self.row = outcome.state.to_json()
            assert queue.AccountState.from_json(self.row) == outcome.state
        if outcome.report is None:
            return None, admitted
        body = outcome.report.to_bytes()
        if not outcome.report.seq < self.seq:
            self.invariants.grows("seq", self.name, (outcome.report.seq,))
        return body, admitted


@dataclass
class HolderShell:
    """The holder's database: the account's row as JSON, the counter of versions, and the limits topic."""

    invariants: Invariants
    epoch: int
    settings: SemaphoreSettings = field(default_factory=SemaphoreSettings)
    version: int = 0
    row: str | None = None
    mirror: LimitMirror | None = None
    due_at_ms: int | None = None
    rebuilding: bool = False
    decisions: int = 0

    def state(self) -> semaphore.AccountState:
        """The account's row, or what the shell makes where there is none."""
        if self.row is not None:
            return semaphore.AccountState.from_json(self.row)
        make = semaphore.rebuilding_account if self.rebuilding else semaphore.new_account
        return make(ACCOUNT, self.epoch, self.mirror)

    def decide(self, messages: Sequence[AccountReport | Command], now_ms: int) -> Decision:
        """One batch of the account, written as the real shell writes it."""
        state = self.state()
        before = state.to_json()
        decision = semaphore.decide(state, messages, now_ms, self.version + 1, self.settings)
        assert state.to_json() == before, "decide() changed the state that it was given"
        self.decisions += 1
        if decision.changed:
            self.version += 1
            self.row = None if decision.delete else decision.state.to_json()
            assert semaphore.AccountState.from_json(decision.state.to_json()) == decision.state
            self.invariants.grows("version", "holder", (self.epoch, self.version), strictly=True)
        else:
            assert decision.state.to_json() == before
        self.due_at_ms = None if decision.delete else decision.due_at_ms
        if decision.mirror is not None:
            self.mirror = read_limit_mirror(decision.mirror.to_bytes())
        for reply in decision.replies:
            self.invariants.grows("reply", reply.client_id, (reply.epoch, reply.version))
            assert read_reply(reply.to_bytes()) == reply
        return decision

    def footprints(self) -> dict[Pair, int]:
        """What is counted for each pair."""
        return {
            (name, group): footprint(client, pair)
            for name, client in self.state().clients.items()
            for group, pair in client.pairs.items()
        }

    def lose_database(self, epoch: int) -> None:
        """The database is gone: a new one is born, and rebuilds from the topic."""
        self.row, self.version, self.epoch, self.due_at_ms, self.rebuilding = None, 0, epoch, None, True

    def go_back(self, row: str | None, epoch: int) -> None:
        """The database is an earlier copy of itself, and that was noticed."""
        self.epoch, self.due_at_ms, self.rebuilding = epoch, None, True
        self.row = None
        if row is not None:
            self.row = semaphore.new_epoch(semaphore.AccountState.from_json(row), epoch, self.mirror).to_json()


def reads(body: bytes) -> AccountReport | Command:
    """A message as the holder reads it."""
    return read_account_message(body)
