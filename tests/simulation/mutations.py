"""Seeded violations: each breaks one rule of the protocol, and the walk or a directed schedule must find it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any
from unittest.mock import patch

from celery_durable.permits import queue
from celery_durable.permits.messages import ReplyGroup
from celery_durable.permits.state import GroupState
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


MUTATIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "count only the newest reply": _count_only_the_newest_reply,
    "ignore keeps": _ignore_keeps,
    "skip the wait for the new epoch": _skip_the_wait_for_the_new_epoch,
    "keep a dead client's demand": _keep_a_dead_clients_demand,
    "free on silence": _free_on_silence,
}
