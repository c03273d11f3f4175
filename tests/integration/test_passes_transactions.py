"""A pass is one transaction: what becomes of its reports and replies, and of a database that was restored."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from celery_durable.dispatcher.passes import REST, REST_MAX_S
from celery_durable.kafka import throttle
from celery_durable.permits.messages import Declared, ReplyGroup
from celery_durable.store import outbox
from celery_durable.store.accounts import wake_declaring
from tests.dispatching import Service, noted_commits


def test_a_rollback_leaves_everything_as_it_was(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """B1: report and state change commit together; a rollback sends nothing and loses no wake."""
    service.add("op")
    service.run_passes()
    service.sent()
    reply = service.reply(ReplyGroup(permits=1), ack_wanted=True)
    with service.database.engine.connect() as connection:
        service.passes().apply_replies(connection, [reply], one_by_one=False)
        connection.rollback()
    assert service.ids("queued") == ["op"]
    assert service.report() is None
    service.add("other", account="zeta")
    monkeypatch.setattr(outbox, "stage", lambda *_: (_ for _ in ()).throw(RuntimeError("crash")))
    assert service.passes().step() is not None
    assert service.count("wakes") == 1
    assert service.account("zeta") is None
    monkeypatch.undo()
    service.run_passes()
    assert service.report("zeta") is not None
    service.apply(reply)
    assert service.ids("admitted") == ["op"]


def test_passes_rest_after_several_accounts_where_no_more_wait(database_url: str) -> None:
    service = Service(database_url, pass_accounts_max=3)
    passes = service.passes()
    for names, rests in ((["one"], False), (["one", "two"], True), (["one", "two", "three"], False)):
        for name in names:
            service.add(f"{name}-{len(names)}", account=name)
        assert passes.step() is None
        assert passes.rest_s(0.01) == (REST * 0.01 if rests else 0.0), names
    service.add("last", account="one")
    service.add("other", account="two")
    assert passes.step() is None
    assert passes.rest_s(60.0) == REST_MAX_S
    service.close()


def test_a_newer_report_survives_the_acknowledgement_of_the_older(service: Service) -> None:
    """B3."""
    service.add("first")
    service.run_passes()
    with service.database.transaction() as connection:
        sent = outbox.claim(connection, service.tables.outbox, limit=10, hold_ms=60_000)
    service.add(*(f"more{n}" for n in range(5)))
    service.run_passes()
    newer = service.report()
    assert newer is not None
    assert newer.seq > json.loads(sent[0].body)["seq"]
    with service.database.transaction() as connection:
        assert outbox.delivered(connection, service.tables.outbox, sent) == 0
    assert service.report() == newer


def test_of_several_replies_the_newest_counts(service: Service) -> None:
    """Rule 5: the others are as if lost, in any order; one for another incarnation is nothing."""
    service.add("a", "b", "c")
    service.run_passes()
    older, newer = service.reply(ReplyGroup(permits=3)), service.reply(ReplyGroup(permits=1))
    foreign = service.reply(ReplyGroup(permits=3), version=99).model_copy(update={"incarnation": "another"})
    service.apply(newer, older, foreign)
    assert service.in_use() == 1
    service.apply(older)
    assert service.in_use() == 1
    assert json.loads(service.account().reply)["version"] == newer.version  # type: ignore[union-attr]


def test_replies_for_another_database_are_told_if_they_last(
    service: Service, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A35: else this one sees nothing but a holder that is silent."""
    monkeypatch.setattr(throttle, "LASTS_S", 0)
    foreign = service.reply(ReplyGroup(permits=3)).model_copy(update={"incarnation": "another"})
    passes = service.passes()
    for _ in range(3):
        service.apply(foreign, passes=passes)
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    for part in ("client_id = 'billing'", "another", "client_id of its own", "celery_durable.forfeit"):
        assert part in warning


def test_a_reply_for_an_account_without_a_row_is_answered(service: Service) -> None:
    """Section 7: the row is created where missing, also to answer a reply; A43: it gives nothing in that very pass."""
    service.apply(service.reply(ReplyGroup(permits=3), account="unknown", answers=0))
    report = service.report("unknown")
    assert report is not None
    assert report.ack is not None
    assert all(one.claimed == one.released for one in report.groups)


def test_a_reply_that_answers_the_future_shows_a_restored_database(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    """A19: the counter of reports goes past what the lost life has drawn, and the permits are void."""
    service.add("op")
    service.run_passes()
    service.lease(1)
    service.add("next")
    service.apply(service.reply(ReplyGroup(permits=5), answers=1_000))
    assert service.newest_seq() > 1_000
    report = service.report()
    assert report is not None
    assert report.seq > 1_000
    assert "it was restored from an earlier state, or a copy of it runs" in caplog.text


def test_a_restored_database_voids_what_it_was_given(service: Service) -> None:
    """A19: noticed by the offsets, before anything is admitted. What the code declares stays."""
    service.add("op")
    with service.database.transaction() as connection:
        wake_declaring(connection, service.tables, {"acme": Declared(limit=7, mutex=True)})
    service.run_passes()
    service.lease(3)
    seq = service.newest_seq()
    service.sent()
    with service.database.transaction() as connection:
        service.passes().restored(connection)
    service.add("next")
    service.run_passes()
    assert service.ids("queued") == ["next"]
    report = service.report()
    assert report is not None
    assert report.seq > seq + 1_000_000
    assert [(one.claimed - one.released, one.waiting) for one in report.groups] == [(1, 1)]
    assert report.declared == Declared(limit=7, mutex=True)


def test_only_a_pass_that_tells_nobody_waits_for_no_disk(postgresql: Service) -> None:
    """What a report says, and that a reply was read, is on the disk before anybody hears of it."""
    service, said = postgresql, noted_commits(postgresql.database)

    def committed(act: Callable[[], object]) -> list[str]:
        said.clear()
        act()
        return list(said)

    passes = service.passes()
    service.add("first")
    assert committed(passes.step) == ["on"], "it reports"
    service.sent()
    reply = service.reply(ReplyGroup(permits=3))
    assert committed(lambda: service.apply(reply, passes=passes)) == ["on"]
    service.add("second")
    assert committed(passes.step) == ["off"]
    assert service.in_use() == 2
    service.add("loud", account="loud")
    service.end("first")
    assert committed(passes.step) == ["on"], "one of its accounts reports"
