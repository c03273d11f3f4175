"""Directed schedules: both cores, where the test moves every message and the clock by hand."""

from __future__ import annotations

from celery_durable.permits.messages import AccountReply, AccountReport, Command, Declared, read_reply
from holder_service.semaphore import Decision, SemaphoreSettings
from tests.invariants import Invariants
from tests.simulation.world import ACCOUNT, ClientShell, HolderShell, Operation, reads

__all__ = ["ACCOUNT", "Stage"]


class Stage:
    """Clients by name, one holder, one clock. Nothing moves unless the test says so.

    What a client's pass stages is in ``reports``, what the holder stages in ``replies``, both by client: the newest
    only, as in an outbox.
    """

    def __init__(self, *names: str, limit: int | None = 1, group_limit: int | None = None) -> None:
        self.now_ms = 1_000_000
        self.limit = limit
        self.group_limits: dict[str, int] = {}
        self.invariants = Invariants()
        declared = Declared(limit=limit, group_limit=group_limit)
        self.clients = {name: ClientShell(name, self.invariants, declared) for name in names or ("a",)}
        self.holder = HolderShell(self.invariants, epoch=self.now_ms)
        self.reports: dict[str, bytes] = {}
        self.replies: dict[str, bytes] = {}
        self.messages = 0
        self.decision: Decision | None = None
        self._number = 0

    def client(self, name: str = "a") -> ClientShell:
        return self.clients[name]

    def later(self, ms: int) -> None:
        self.now_ms += ms

    def enqueue(self, name: str = "a", number: int = 1, group: str = "", *, quietly: bool = False) -> None:
        """Rows are inserted; a pass follows unless ``quietly``."""
        for _ in range(number):
            self._number += 1
            self.client(name).waiting[group].append(Operation(self._number, group, self.now_ms, 0))
        if not quietly:
            self.run_pass(name)

    def end(self, name: str = "a", number: int = 1, group: str = "", *, quietly: bool = False) -> None:
        """The oldest running operations of the group end; a pass follows unless ``quietly``."""
        running = self.client(name).running
        for key in sorted(key for key, operation in running.items() if operation.group == group)[:number]:
            del running[key]
        if not quietly:
            self.run_pass(name)

    def run_pass(self, name: str = "a", reply: bytes | AccountReply | None = None) -> AccountReport | None:
        """One pass. Returns the report that it stages, if any."""
        if isinstance(reply, bytes):
            reply = read_reply(reply)
        report, admitted = self.client(name).run_pass(self.now_ms, reply)
        if admitted and self.limit is not None:
            self.invariants.bound(self.in_use(), self.limit, self.group_limits)
        if report is None:
            return None
        self.reports[name] = report
        message = reads(report)
        assert isinstance(message, AccountReport)
        return message

    def decide(self, *messages: bytes | AccountReport | Command) -> Decision:
        """The holder handles these messages, or only its timers."""
        read = [reads(message) if isinstance(message, bytes) else message for message in messages]
        self.decision = self.holder.decide(read, self.now_ms)
        for reply in self.decision.replies:
            self.replies[reply.client_id] = reply.to_bytes()
        return self.decision

    def report(self, name: str = "a") -> bytes:
        """The staged report of a client, which is taken out."""
        self.messages += 1
        return self.reports.pop(name)

    def reply(self, name: str = "a") -> bytes:
        """The staged reply to a client, which is taken out."""
        self.messages += 1
        return self.replies.pop(name)

    def deliver(self, rounds: int = 20) -> None:
        """Moves all that is staged, and all that it causes, without time passing."""
        for _ in range(rounds):
            if not self.reports and not self.replies:
                return
            if self.reports:
                self.decide(*[self.report(name) for name in list(self.reports)])
            for name in list(self.replies):
                self.run_pass(name, self.reply(name))
        raise AssertionError("messages go round without end")

    def play(self, ms: int, *, duration_ms: int | None = None, step_ms: int = 50) -> None:
        """Time passes with every message delivered at once, timers run, and operations that end after a while."""
        ends: dict[int, int] = {}
        until_ms = self.now_ms + ms
        while self.now_ms < until_ms:
            self.later(step_ms)
            for name, client in self.clients.items():
                if duration_ms is not None:
                    for number, operation in list(client.running.items()):
                        if ends.setdefault(number, self.now_ms + duration_ms) <= self.now_ms:
                            self.end(name, group=operation.group)
                if client.due_at_ms is not None and client.due_at_ms <= self.now_ms:
                    self.run_pass(name)
            if self.holder.due_at_ms is not None and self.holder.due_at_ms <= self.now_ms:
                self.decide()
            self.deliver()

    def in_use(self) -> dict[tuple[str, str], int]:
        return {
            (name, group): count for name, client in self.clients.items() for group, count in client.in_use().items()
        }

    def used(self, name: str = "a", group: str | None = None) -> int:
        counts = self.client(name).in_use()
        return sum(counts.values()) if group is None else counts.get(group, 0)

    def left(self, name: str = "a", group: str = "") -> int:
        return len(self.client(name).waiting[group])

    def footprint(self, name: str = "a") -> int:
        return sum(count for (client, _), count in self.holder.footprints().items() if client == name)

    def settings(self, **values: object) -> None:
        """Other settings of the holder."""
        self.holder.settings = SemaphoreSettings(**values)  # type: ignore[arg-type]
