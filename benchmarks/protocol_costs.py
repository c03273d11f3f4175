"""What the protocol says and keeps in the situations that a capacity is made of, counted on both of its cores.

Real decisions, real messages as bytes, real rows as JSON; only the clock and what carries the messages are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from celery_durable.permits.messages import AccountReport, Declared, read_account_message, read_reply
from tests.invariants import Invariants
from tests.simulation.world import ACCOUNT, ClientShell, HolderShell, Operation

START_MS = 1_800_000_000_000
NUMBERS = 10_000_000
"""Where counters stand in a system that has been running for a while: digits are bytes."""
ROUND_TRIP_MS, RUNS_MS = 20, 1_000
LIMIT = 5
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


@dataclass(frozen=True, slots=True)
class Exchange:
    """Messages of one account and service, both ways, and their bytes."""

    reports: int
    replies: int
    report_bytes: int
    reply_bytes: int


@dataclass(frozen=True, slots=True)
class Costs:
    """What each situation says, and what is kept of an account meanwhile, in bytes of a row's JSON.

    :param call: a call of an account that had no row, from its enqueue until both rows are gone.
    :param held: a permit in use for a day. :param waiting: a service whose operation waits for a day for a permit that
        another one uses.
    :param holder_row: the holder's row of an account that one service uses; :param holder_row_more: each further one.
    :param client_row: a service's row of an account.
    """

    call: Exchange
    held: Exchange
    waiting: Exchange
    holder_row: int
    holder_row_more: int
    client_row: int


class _World:
    """Some services and a holder, whose messages all arrive after a moment."""

    def __init__(self, clients: int, limit: int) -> None:
        invariants = Invariants()
        self.now_ms = START_MS
        self.holder = HolderShell(invariants, START_MS - 1, version=NUMBERS)
        self.clients = {
            name: ClientShell(name, invariants, Declared(limit=limit), incarnation="0" * 32, seq=NUMBERS)
            for name in (f"service-{number}" for number in range(clients))
        }
        self.spoken: dict[str, list[tuple[str, int]]] = {name: [] for name in self.clients}
        self._number = 0

    def enqueue(self, name: str) -> None:
        """One operation, and all that follows at once."""
        self._number += 1
        self.clients[name].waiting[""].append(Operation(self._number, "", self.now_ms, RUNS_MS))
        self._pass(name)

    def end(self, name: str) -> None:
        """All that runs there has ended."""
        self.clients[name].running.clear()
        self._pass(name)

    def advance(self, until_ms: int) -> None:
        """Whatever timers bring until then."""
        while (due := self._next()) is not None and due[0] <= until_ms:
            self.now_ms = max(self.now_ms, due[0])
            if due[1]:
                self._pass(due[1])
            else:
                self._decide(())
        self.now_ms = max(self.now_ms, until_ms)

    def exchange(self, name: str) -> Exchange:
        """What was said between that service and the holder so far."""
        reports = [size for kind, size in self.spoken[name] if kind == "report"]
        replies = [size for kind, size in self.spoken[name] if kind == "reply"]
        return Exchange(len(reports), len(replies), sum(reports), sum(replies))

    def row_bytes(self, name: str = "") -> int:
        """Of the service's row, or of the holder's."""
        return len(((self.clients[name].row if name else self.holder.row) or "").encode())

    def _next(self) -> tuple[int, str] | None:
        due = [(client.due_at_ms, name) for name, client in self.clients.items() if client.due_at_ms is not None]
        if self.holder.due_at_ms is not None:
            due.append((self.holder.due_at_ms, ""))
        return min(due, default=None)

    def _pass(self, name: str, reply: bytes | None = None) -> None:
        body, _ = self.clients[name].run_pass(self.now_ms, None if reply is None else read_reply(reply))
        if body is not None:
            self.spoken[name].append(("report", len(body)))
            message = read_account_message(body)
            assert isinstance(message, AccountReport)
            self.now_ms += ROUND_TRIP_MS // 2
            self._decide((message,))

    def _decide(self, messages: tuple[AccountReport, ...]) -> None:
        for reply in self.holder.decide(messages, self.now_ms).replies:
            body = reply.to_bytes()
            self.spoken[reply.client_id].append(("reply", len(body)))
            self.now_ms += ROUND_TRIP_MS // 2
            self._pass(reply.client_id, body)


def _call() -> Exchange:
    world = _World(1, LIMIT)
    (name,) = world.clients
    world.enqueue(name)
    world.advance(world.now_ms + RUNS_MS)
    world.end(name)
    world.advance(world.now_ms + HOUR_MS)
    if world.clients[name].row is not None or world.holder.row is not None:
        raise AssertionError("an account in which nothing happens keeps a row")
    return world.exchange(name)


def _a_day_of(world: _World, name: str) -> Exchange:
    before = world.exchange(name)
    world.advance(world.now_ms + DAY_MS)
    after = world.exchange(name)
    return Exchange(
        after.reports - before.reports,
        after.replies - before.replies,
        after.report_bytes - before.report_bytes,
        after.reply_bytes - before.reply_bytes,
    )


def _holding(clients: int) -> _World:
    world = _World(clients, clients)
    for name in world.clients:
        world.enqueue(name)
    world.advance(world.now_ms + HOUR_MS)  # what they were given beyond it goes back
    return world


@cache
def costs() -> Costs:
    """Counts all of it."""
    one, two = _holding(1), _holding(2)
    waiting = _World(2, 1)
    for name in waiting.clients:
        waiting.enqueue(name)
    waiting.advance(waiting.now_ms + HOUR_MS)  # its repeats have backed off
    first, last = waiting.clients
    row, client_row = one.row_bytes(), one.row_bytes(first)
    return Costs(
        call=_call(),
        held=_a_day_of(one, first),
        waiting=_a_day_of(waiting, last),
        holder_row=row,
        holder_row_more=two.row_bytes() - row,
        client_row=client_row,
    )


KEY_BYTES = len(ACCOUNT.encode())
