"""Commands to a holder are rows of the outbox, in the caller's transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import _state
from sqlalchemy import update
from sqlalchemy.orm import Session

import celery_durable
from celery_durable import EnqueueError, using
from celery_durable.permits.messages import Forfeit, Pause, Resume, SetLimit, read_account_message
from holder_service import semaphore
from tests.integration.enqueue_service import Service, service


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgresql)])
def shop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    url = request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgresql_server")
    with service(url) as shop:
        monkeypatch.setattr(_state._tls, "current_app", shop.app)  # of this thread, for this test
        yield shop


def staged(shop: Service) -> list[Any]:
    return [read_account_message(row.body) for row in shop.rows(shop.tables.outbox)]


def test_each_command_is_the_message_that_the_holder_reads(shop: Service) -> None:
    celery_durable.limits.set("acme", 5, by="ops", why="incident 7")
    celery_durable.limits.set("acme", 0, group="wf-7", app=shop.app)
    celery_durable.limits.unset("zeta")
    celery_durable.pause("acme")
    celery_durable.forfeit("acme", "shipping", epoch=3, version=9, why="switched off")
    common: dict[str, Any] = {"client_id": "billing", "account": "acme"}
    limit, group, unset, pause, forfeit = commands = staged(shop)
    assert limit == SetLimit(**common, seq=limit.seq, by="ops", why="incident 7", limit=5)
    assert (group.group, group.limit) == ("wf-7", 0)
    assert (type(unset), unset.account, unset.limit) == (SetLimit, "zeta", None)
    assert type(pause) is Pause
    assert pause.by
    assert (type(forfeit), forfeit.client, forfeit.epoch, forfeit.version) == (Forfeit, "shipping", 3, 9)
    assert [each.seq for each in commands] == sorted({each.seq for each in commands})
    rows = shop.rows(shop.tables.outbox)
    assert {row.topic for row in rows} == {"celery-durable.accounts"}
    assert [row.key for row in rows] == ["acme", "acme", "zeta", "acme", "acme"]


def test_a_newer_command_replaces_an_unsent_one_of_its_own_kind_and_target(shop: Service) -> None:
    for limit in (1, 2, 3):
        celery_durable.limits.set("acme", limit)
        celery_durable.limits.set("acme", limit, group="*")
    celery_durable.pause("acme")
    celery_durable.resume("acme")
    found = staged(shop)
    assert [(type(each), getattr(each, "group", None), getattr(each, "limit", None)) for each in found] == [
        (SetLimit, None, 3),
        (SetLimit, "*", 3),
        (Resume, None, None),
    ]
    assert [each.seq for each in found] == sorted({each.seq for each in found})


def test_a_database_that_was_restored_or_made_anew_is_still_obeyed(shop: Service) -> None:
    """A19, A20: its counter went back, while the holder ignores what is numbered below what it has seen."""
    celery_durable.limits.set("acme", 3)
    (before,) = staged(shop)
    counters = shop.tables.counters
    with shop.runtime.database.transaction() as connection:
        connection.execute(update(counters).where(counters.c.name == "command_seq").values(value=0))
    celery_durable.limits.set("acme", 5)
    (after,) = staged(shop)
    settings = semaphore.SemaphoreSettings()
    state = semaphore.decide(semaphore.new_account("acme", 1), [before], 1_000, 1, settings).state
    assert semaphore.decide(state, [after], 2_000, 2, settings).state.limit == 5


def test_a_command_that_is_rolled_back_was_never_given(shop: Service) -> None:
    """E3, B1"""
    with Session(shop.runtime.database.engine) as session:
        with using(session):
            celery_durable.limits.set("acme", 5)
            celery_durable.pause("acme")
        session.rollback()
        assert staged(shop) == []
        with using(session):
            celery_durable.limits.set("acme", 7)
        session.commit()
    assert [each.limit for each in staged(shop)] == [7]


@pytest.mark.parametrize("limit", [True, -1, 1.5, float("nan"), "5", None, 10**9 + 1])
def test_limits_that_are_none_are_refused_by_name(sqlite_url: str, limit: Any) -> None:
    """E6"""
    with service(sqlite_url) as shop:
        with pytest.raises(EnqueueError, match=r"limit = .*give a whole number from 0"):
            celery_durable.limits.set("acme", limit, app=shop.app)
        assert staged(shop) == []


WRONG: list[tuple[Callable[..., None], tuple[Any, ...], dict[str, Any], str]] = [
    (celery_durable.limits.set, ("", 5), {}, "account = ''"),
    (celery_durable.limits.set, (5, 5), {}, "account = 5"),
    (celery_durable.limits.set, ("a", 5), {"group": 5}, "group = 5"),
    (celery_durable.limits.unset, ("",), {}, "account = ''"),
    (celery_durable.pause, (None,), {}, "account = None"),
    (celery_durable.resume, ("a\0",), {}, "account = 'a\\x00'"),
    (celery_durable.pause, ("a",), {"why": 5}, "why = 5"),
    (celery_durable.pause, ("a",), {"why": "\ud800"}, "why = '\\ud800'"),
    (celery_durable.pause, ("a",), {"by": b"me"}, "by = b'me'"),
    (celery_durable.limits.set, ("a", 5), {"why": "x" * 5_000_000}, "at most 2000 bytes"),
    (celery_durable.forfeit, ("a", ""), {"epoch": 1, "version": 1, "why": "x"}, "client = ''"),
    (celery_durable.forfeit, ("a", "b"), {"epoch": True, "version": 1, "why": "x"}, "epoch = True"),
    (celery_durable.forfeit, ("a", "b"), {"epoch": 1, "version": -1, "why": "x"}, "version = -1"),
    (celery_durable.forfeit, ("a", "b"), {"epoch": 1, "version": 1, "why": " "}, "why = ' '"),
]


def test_wrong_commands_are_refused_by_name(sqlite_url: str) -> None:
    with service(sqlite_url) as shop:
        for command, args, options, says in WRONG:
            with pytest.raises(EnqueueError) as caught:
                command(*args, **options, app=shop.app)
            assert says in str(caught.value)
        assert staged(shop) == []
        # The counter stands where it stood: what was refused drew no number that another command would miss.
        assert {row.name: row.value for row in shop.rows(shop.tables.counters)}["command_seq"] == 0
