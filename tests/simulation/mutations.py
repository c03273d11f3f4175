"""Seeded violations: each breaks one rule of the protocol, and the walk or a directed schedule must find it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest.mock import patch

from sqlalchemy import Connection, Table, delete, insert, update

from celery_durable.kafka import opening
from celery_durable.permits import queue
from celery_durable.permits.messages import ReplyGroup
from celery_durable.permits.state import GroupState
from celery_durable.store import attempts, offsets, outbox
from celery_durable.store.accounts import Accounts
from celery_durable.store.attempt_sql import AttemptStatements
from celery_durable.store.delivery import Deliveries
from celery_durable.store.recovery import Recoveries
from holder_service import account, allocation, footprint, intake, semaphore
from holder_service.account import Client, Entry, Pair


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
    counts = Accounts.counts

    def nothing_in_use(self: Accounts, connection: Connection, locked: Collection[str]) -> Any:
        found = counts(self, connection, locked)
        return {key: {name: replace(one, in_use=0) for name, one in groups.items()} for key, groups in found.items()}

    return patch.object(Accounts, "counts", nothing_in_use)


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


MUTATIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "count only the newest reply": _count_only_the_newest_reply,
    "ignore keeps": _ignore_keeps,
    "skip the wait for the new epoch": _skip_the_wait_for_the_new_epoch,
    "keep a dead client's demand": _keep_a_dead_clients_demand,
    "free on silence": _free_on_silence,
    "admit without counting": _admit_without_counting,
    "advance without compare-and-set": _advance_without_compare_and_set,
    "settle without token": _settle_without_token,
    "start what runs": _start_what_runs,
    "send without commit": _send_without_commit,
    "trust a database that went back": _trust_a_database_that_went_back,
    "turns without end": _turns_without_end,
    "settle without a wake": _settle_without_a_wake,
    "never send again": _forget_what_is_due,
    "delete what runs": _delete_what_runs,
}
