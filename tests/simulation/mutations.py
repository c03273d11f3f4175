"""Seeded violations: each breaks one rule, and one check must turn red within a stated number of seeds."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

from sqlalchemy import Connection, Table, bindparam, delete, insert, select, update

from celery_durable.kafka import opening
from celery_durable.permits import queue
from celery_durable.permits.messages import ReplyGroup
from celery_durable.permits.state import GroupState
from celery_durable.store import attempts, counters, losses, offsets, outbox
from celery_durable.store.account_sql import REPORT_SEQ
from celery_durable.store.accounts import Accounts
from celery_durable.store.attempt_sql import AttemptStatements
from celery_durable.store.attempts import Attempt, Attempts, Ending, Started
from celery_durable.store.delivery import Deliveries
from celery_durable.store.operations import Operations
from celery_durable.store.recovery import Recoveries
from celery_durable.store.schema import Tables
from holder_service import account, allocation, footprint, intake, life, semaphore
from holder_service.account import Client, Entry, Pair
from holder_service.store import VERSION_COUNTER, HolderTables, Write


@contextmanager
def _everywhere(name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replaces a function in each of the holder's modules that imported it."""
    modules: list[ModuleType] = [footprint, intake, allocation, semaphore]
    patches = [patch.object(module, name, replacement) for module in modules if hasattr(module, name)]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()


def _count_only_the_newest_reply() -> AbstractContextManager[Any]:
    def show(client: Client, pair: Pair, version: int, permits: int, turn_ms: int | None = None) -> None:
        newest = pair.newest
        if (newest.permits, newest.turn_ms) != (permits, turn_ms):
            client.dirty = True
            pair.entries[:] = [Entry(version, permits, None, turn_ms)]

    return _everywhere("show", show)


def _ignore_keeps() -> AbstractContextManager[Any]:
    def give(group: GroupState, given: ReplyGroup | None, now_ms: int) -> None:
        group.permits = 0 if given is None else given.permits
        group.turn_until_ms = None if given is None or given.turn_ms is None else now_ms + given.turn_ms
        group.used_at_ms = now_ms

    return patch.object(queue, "_give", give)


def _skip_the_wait_for_the_new_epoch() -> AbstractContextManager[Any]:
    return patch.object(account.AccountState, "waits_for_epoch", property(lambda _state: False))


def _keep_a_dead_clients_demand() -> AbstractContextManager[Any]:
    return patch.object(semaphore, "forget_demand", lambda _client: None)


def _free_on_silence() -> AbstractContextManager[Any]:
    def order_stop(_work: object, client: Client) -> None:
        for pair in client.pairs.values():
            client.dirty = client.dirty or bool(pair.entries)
            pair.entries.clear()
            pair.used = 0

    return patch.object(semaphore, "order_stop", order_stop)


# What follows breaks the shells: only the simulation of them can find it.


def _admit_without_counting() -> AbstractContextManager[Any]:
    facts = Accounts.facts

    def nothing_in_use(self: Accounts, connection: Connection, locked: Collection[str]) -> Any:
        found = facts(self, connection, locked)
        for groups in found.counts.values():
            groups.update({name: replace(one, in_use=0) for name, one in groups.items()})
        return found

    return patch.object(Accounts, "facts", nothing_in_use)


def _advance_without_compare_and_set() -> AbstractContextManager[Any]:
    def advance(connection: Connection, table: Table, old: offsets.Position | None, new: offsets.Position) -> None:
        place = (table.c.topic == new.topic) & (table.c.partition == new.partition)
        values = {"topic_id": new.topic_id, "next_offset": new.next_offset}
        if connection.execute(update(table).where(place).values(values)).rowcount == 0:
            connection.execute(insert(table).values(topic=new.topic, partition=new.partition, **values))

    return patch.object(offsets, "advance", advance)


def _attempts(change: Callable[[str], str]) -> AbstractContextManager[Any]:
    """Changes the statements of the workers."""

    class Changed(AttemptStatements):
        def _sql(self, template: str) -> str:
            return change(super()._sql(template))

    return patch.object(attempts, "AttemptStatements", Changed)


def _settle_without_token() -> AbstractContextManager[Any]:
    return _attempts(lambda sql: sql.replace("AND run_token = :token AND state = 'running'", "AND state = 'running'"))


def _start_what_runs() -> AbstractContextManager[Any]:
    return _attempts(lambda sql: sql.replace("state = 'running' AND run_token = :token)", "state = 'running')"))


def _send_without_commit() -> AbstractContextManager[Any]:
    stage = outbox.stage

    def send(connection: Connection, table: Table, messages: Sequence[outbox.Staged]) -> None:
        from tests.simulation import bus, wiring

        for one in messages:
            wiring.world().bus.write(one.topic, bus.Stored(one.key.encode(), one.body, (), 0))
        stage(connection, table, messages)

    return patch.object(outbox, "stage", send)


def _trust_a_database_that_went_back() -> AbstractContextManager[Any]:
    return patch.object(opening, "went_back", lambda *_: False)


def _turns_without_end() -> AbstractContextManager[Any]:
    return patch.object(GroupState, "turn_is_over", lambda _self, _now_ms: False)


def _settle_without_a_wake() -> AbstractContextManager[Any]:
    return _attempts(lambda sql: "SELECT 1" if "wakes" in sql else sql)


def _forget_what_is_due() -> AbstractContextManager[Any]:
    return patch.object(Deliveries, "claim_again", lambda *_: [])


def _delete_what_runs() -> AbstractContextManager[Any]:
    def delete_ended(self: Recoveries, connection: Connection, limit: int, default_ms: int) -> int:
        table = self._tables.operations
        return connection.execute(delete(table).where(table.c.state == "running")).rowcount

    return patch.object(Recoveries, "delete_ended", delete_ended)


def _give_groups_no_limit() -> AbstractContextManager[Any]:
    return patch.object(semaphore, "group_limits_in_force", lambda *_: lambda _group: None)


def _admit_one_more_than_was_given() -> AbstractContextManager[Any]:
    room = GroupState.room
    return patch.object(GroupState, "room", lambda self, in_use, now_ms: room(self, in_use, now_ms) + 1)


def _ignore_ceilings() -> AbstractContextManager[Any]:
    def room(self: GroupState, in_use: int, now_ms: int) -> int:
        return 0 if self.turn_is_over(now_ms) else max(0, self.permits - in_use)

    return patch.object(GroupState, "room", room)


def _apply_an_older_reply() -> AbstractContextManager[Any]:
    applied = queue._applied

    def apply(state: queue.AccountState, *arguments: Any) -> queue.AccountState:
        return applied(replace(state, ack=None), *arguments)

    return patch.object(queue, "_applied", apply)


def _number_reports_anew_with_each_row() -> AbstractContextManager[Any]:
    delete_rows = Accounts.delete

    def delete_and_restart(self: Accounts, connection: Connection, keys: Collection[str]) -> None:
        delete_rows(self, connection, keys)
        if keys:
            table = self._tables.counters
            connection.execute(update(table).where(table.c.name == REPORT_SEQ).values(value=0))

    return patch.object(Accounts, "delete", delete_and_restart)


def _number_decisions_backwards() -> AbstractContextManager[Any]:
    draw = counters.draw

    def draw_backwards(connection: Connection, table: Table, name: str, count: int = 1) -> range:
        drawn = draw(connection, table, name, count)
        last = 1_000_000 - 100 * drawn[0]
        return range(last, last + count) if name == VERSION_COUNTER else drawn

    return patch.object(counters, "draw", draw_backwards)


def _begin_an_older_epoch() -> AbstractContextManager[Any]:
    change = life.change

    def change_back(connection: Connection, tables: Any, old: life.Life, **to: Any) -> life.Life:
        if to.get("epoch") is not None:
            to["epoch"] = old.epoch - 1
        return change(connection, tables, replace(old, epoch=0) if "epoch" in to else old, **to)

    return patch.object(life, "change", change_back)


def _move_offsets_back() -> AbstractContextManager[Any]:
    advance = offsets.advance

    def back(connection: Connection, table: Table, old: offsets.Position | None, new: offsets.Position) -> None:
        advance(connection, table, old, new if old is None else replace(new, next_offset=max(0, old.next_offset - 1)))

    return patch.object(offsets, "advance", back)


def _write_without_compare_and_set() -> AbstractContextManager[Any]:
    from tests.simulation import wiring

    def write(connection: Connection, tables: HolderTables, writes: Sequence[Write]) -> None:
        known = dict(connection.execute(select(tables.accounts.c.account, tables.accounts.c.version)).all())
        production(connection, tables, [replace(write, old_version=known.get(write.account)) for write in writes])

    production = wiring._write_rows
    return patch.object(wiring, "_write_rows", write)


def _retry_the_attempt_before() -> AbstractContextManager[Any]:
    return _attempts(lambda sql: re.sub(r"attempt = attempt \+ CASE", "attempt = attempt - CASE", sql))


def _cancel_what_has_ended() -> AbstractContextManager[Any]:
    def cancel(self: Operations, connection: Connection, operation_id: str, *_: Any, **__: Any) -> str:
        table = self._tables.operations
        at_rest = (table.c.id == operation_id) & (table.c.state != "running")
        connection.execute(update(table).where(at_rest).values(state="cancelled"))
        return "cancelled"

    return patch.object(Operations, "cancel", cancel)


def _give_by_the_highest_limit() -> AbstractContextManager[Any]:
    from tests.simulation import wiring

    allocate = semaphore._allocate
    highest: dict[tuple[int, str], int] = {}

    def by_the_highest(work: Any, limit: int, settings: Any) -> Any:
        key = (wiring.world().seed, work.state.account)
        highest[key] = max(limit, highest.get(key, 0))
        return allocate(work, highest[key], settings)

    return patch.object(semaphore, "_allocate", by_the_highest)


def _take_what_still_beats() -> AbstractContextManager[Any]:
    def overdue(tables: Tables) -> Any:
        return losses._running(tables).limit(bindparam("limit"))

    return patch.object(losses, "_overdue", overdue)


def _fail_what_was_lost_once() -> AbstractContextManager[Any]:
    decide = losses.decide
    return patch.object(losses, "decide", lambda lost, why, **_: decide(lost, why, losses_max=0))


def _run_what_runs() -> AbstractContextManager[Any]:
    start = Attempts.start

    def start_anyway(self: Attempts, attempt: Attempt, **options: Any) -> Started | None:
        started = start(self, attempt, **options)
        if started is None:
            connection: Any = self._database.held().connection.driver_connection
            sql = "SELECT 1 FROM durable_operations WHERE id = ? AND state = 'running'"
            if connection.execute(sql, (attempt.id,)).fetchall():
                return Started(None, cancel_requested=False, has_account=True)
        return started

    return patch.object(Attempts, "start", start_anyway)


def _repeat_what_succeeded() -> AbstractContextManager[Any]:
    succeed = Attempts.succeed

    def repeat_once(self: Attempts, attempt: Attempt, ending: Ending) -> str:
        return (self.repeat if attempt.attempt == 1 else partial(succeed, self))(attempt, ending)

    return patch.object(Attempts, "succeed", repeat_once)


def _settle_before_the_body_ends(*, in_groups: bool = False) -> AbstractContextManager[Any]:
    from tests.simulation.workers import Body, Worker

    end = Worker._end

    def end_early(self: Worker, body: Body) -> None:
        end(self, body)
        _, group = self.world.runs.called[body.attempt.id]
        if body.over and body.returned and (group or not in_groups):
            body.returned = False
            self.bodies.append(body)
            self.at(500, lambda: self.bodies.remove(body))

    return patch.object(Worker, "_end", end_early)


def _believe_nothing_is_given_back() -> AbstractContextManager[Any]:
    return _everywhere("keep", lambda _pair, _keeps: False)


def _leave_no_mark_of_an_end() -> AbstractContextManager[Any]:
    return patch.object(Attempt, "marks", lambda _attempt, _state: False)


def _leave_idle_rows() -> AbstractContextManager[Any]:
    return patch.object(Accounts, "delete", lambda *_: None)


def _serve_the_first_pair() -> AbstractContextManager[Any]:
    return patch.object(allocation.Seat, "order", property(lambda seat: (0, seat.client_id, seat.group)))


def answer_in_an_older_version() -> AbstractContextManager[Any]:
    """Replies are numbered below the last one, now and then: only the walk of the pure cores looks at them."""
    reply = semaphore.AccountReply

    def older(**fields: Any) -> Any:
        return reply(**fields | {"version": fields["version"] - (fields["version"] > 1 and fields["answers"] % 2)})

    return patch.object(semaphore, "AccountReply", older)


@dataclass(frozen=True, slots=True)
class Mutation:
    """One rule, broken."""

    breaks: Callable[[], AbstractContextManager[Any]]
    turns_red: tuple[str, ...] = ()
    """The check that finds it; more than one where the same fact shows in several first."""
    seed: int = 0
    """A seed that finds it, or one shortly before it."""
    profile: bool = False
    """Only seeds with the profile of that seed are tried by the test."""


MUTATIONS: dict[str, Mutation] = {
    "": Mutation(nullcontext),
    "admit without counting": Mutation(_admit_without_counting, ("bound",)),
    "give groups no limit": Mutation(_give_groups_no_limit, ("group bound",), seed=1),
    "admit one more than was given": Mutation(_admit_one_more_than_was_given, ("level",), seed=28),
    "ignore ceilings": Mutation(_ignore_ceilings, ("ceiling",), seed=14, profile=True),
    "count only the newest reply": Mutation(_count_only_the_newest_reply, ("covers", "bound"), seed=7, profile=True),
    "ignore keeps": Mutation(_ignore_keeps, ("covers", "bound"), seed=63, profile=True),
    "skip the wait for the new epoch": Mutation(
        _skip_the_wait_for_the_new_epoch, ("covers", "bound"), seed=79, profile=True
    ),
    "free on silence": Mutation(_free_on_silence, ("covers", "bound"), seed=11, profile=True),
    "apply an older reply": Mutation(_apply_an_older_reply, ("ack",), seed=2),
    "number reports anew with each row": Mutation(_number_reports_anew_with_each_row, ("seq",)),
    "number decisions backwards": Mutation(_number_decisions_backwards, ("version",)),
    "begin an older epoch": Mutation(_begin_an_older_epoch, ("epoch",), seed=19, profile=True),
    "move offsets back": Mutation(_move_offsets_back, ("offset",)),
    "retry the attempt before": Mutation(_retry_the_attempt_before, ("attempt",), seed=1),
    "advance without compare-and-set": Mutation(_advance_without_compare_and_set, ("read once",), seed=3),
    "write without compare-and-set": Mutation(
        _write_without_compare_and_set, ("at its version",), seed=63, profile=True
    ),
    "settle without token": Mutation(_settle_without_token, ("fenced",), seed=47, profile=True),
    "start what runs": Mutation(_start_what_runs, ("fenced",), seed=1),
    "trust a database that went back": Mutation(_trust_a_database_that_went_back, ("noticed",), seed=22, profile=True),
    "send without commit": Mutation(_send_without_commit, ("one body",), seed=4),
    "cancel what has ended": Mutation(_cancel_what_has_ended, ("ended stays",), seed=31, profile=True),
    "delete what runs": Mutation(_delete_what_runs, ("kept",), seed=1),
    "settle without a wake": Mutation(_settle_without_a_wake, ("all ran",)),
    "never send again": Mutation(_forget_what_is_due, ("all ran",), seed=1),
    "keep a dead client's demand": Mutation(_keep_a_dead_clients_demand, ("all ran",), seed=12, profile=True),
    "turns without end": Mutation(_turns_without_end, ("starves",)),
    "serve the first pair": Mutation(_serve_the_first_pair, ("passed over",), seed=9, profile=True),
    "believe that nothing is given back": Mutation(
        _believe_nothing_is_given_back, ("quiescence",), seed=52, profile=True
    ),
    "give by the highest limit": Mutation(_give_by_the_highest_limit, ("over",), seed=7, profile=True),
    "take what still beats": Mutation(_take_what_still_beats, ("overdue",), seed=1),
    "fail what was lost once": Mutation(_fail_what_was_lost_once, ("right end",), seed=1),
    "settle before the body ends": Mutation(_settle_before_the_body_ends, ("bodies",)),
    "settle before the body ends, in groups": Mutation(
        partial(_settle_before_the_body_ends, in_groups=True), ("group bodies",), seed=31, profile=True
    ),
    "leave no mark of an end": Mutation(_leave_no_mark_of_an_end, ("told",), seed=7, profile=True),
    "run what runs": Mutation(_run_what_runs, ("caused", "bodies"), seed=1),
    "repeat what succeeded": Mutation(_repeat_what_succeeded, ("caused",)),
    "leave idle rows": Mutation(_leave_idle_rows, ("rows",)),
}


def broken(name: str) -> AbstractContextManager[Any]:
    """The rule of that name is broken meanwhile."""
    return MUTATIONS[name].breaks()


def finds(name: str, failure: str) -> bool:
    """Whether a seed's failure is that of the check which is to find the broken rule."""
    return failure.startswith(tuple(f"{check}:" for check in MUTATIONS[name].turns_red))
