"""The holder's service on real databases and brokers: transactions, timers, crashes, two owners of one partition."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from celery_durable.permits.messages import Forfeit, Pause, SetLimit
from celery_durable.store import outbox
from holder_service import ledger, semaphore, store
from holder_service.store import VersionMoved
from tests.harness import Kafka
from tests.integration.holder_rig import PARTITIONS, Client, Instance, Race, Rig, accounts_of_partition
from tests.kafka_parts import partition_of


@pytest.fixture(
    params=[
        "embedded",
        pytest.param("real", marks=[pytest.mark.postgresql, pytest.mark.kafka]),
    ]
)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """SQLite and the mock cluster, then PostgreSQL and Kafka."""
    names = ("sqlite_url", "mock_kafka") if request.param == "embedded" else ("postgresql_url", "kafka")
    yield from _rig(*(request.getfixturevalue(name) for name in names))


@pytest.fixture
def quick_rig(database_url: str, kafka: Kafka) -> Iterator[Rig]:
    """Both databases on the test run's Kafka, where joining a group takes no seconds."""
    yield from _rig(database_url, kafka)


def _rig(database_url: str, kafka: Kafka, **settings: Any) -> Iterator[Rig]:
    rig = Rig(database_url, kafka, **settings)
    yield rig
    rig.close()


def served(holder: Instance, client: Client, account: str) -> None:
    """Steps until the client could claim a permit in ``account``."""
    holder.until(lambda: client.try_to_claim(account), f"a permit in {account} for {client.client_id}")


def test_the_first_report_is_answered_with_a_permit_and_an_idle_account_leaves_no_row(rig: Rig) -> None:
    """Cases A21, E9 and E1: one report, one reply; the limit that nobody declared is 1."""
    holder, client = rig.holder().serving(), rig.client("billing")
    client.report("acme", waiting=3)
    holder.until(client.pump, "a reply")
    first = client.replies[0]
    assert (first.account, first.answers, [g.permits for g in first.groups]) == ("acme", 1, [1])
    assert first.account_limit is not None
    assert first.account_limit.limit == 1
    assert client.claim("acme")
    assert not client.claim("acme")
    client.report("acme")
    holder.until(lambda: (usage := rig.usage("acme")) and usage.in_use == 1, "the claim")
    client.release("acme")
    client.report("acme", waiting=0, gives_back=True)
    holder.until(lambda: (client.try_to_claim("acme"), rig.usage("acme") is None)[1], "the row to go")
    client.report("acme", waiting=1)
    served(holder, client, "acme")


def test_two_clients_that_race_for_the_last_permit(rig: Rig) -> None:
    """Case A9: in each of 40 accounts exactly one gets it first, and the other gets it after."""
    holder = rig.holder().serving()
    clients = [rig.client("billing"), rig.client("shipping")]
    accounts = [f"race:{number}" for number in range(40)]
    dice = random.Random(9)
    for account in accounts:
        for client in dice.sample(clients, 2):
            client.report(account, waiting=1)
    race = Race(rig, clients, accounts, dice)

    def over() -> bool:
        race.step()
        return len(race.ended) == 2 * len(accounts)

    holder.until(over, "all to be served")
    holder.until(rig.give_back(clients), "rest")
    rig.invariants.require("bound", "covers", "quiescence", "rows")
    assert sorted(race.ended) == sorted((account, client.client_id) for account in accounts for client in clients)


def test_what_cannot_be_read_becomes_a_dead_letter_and_the_partition_goes_on(rig: Rig) -> None:
    """Case B7: the reason is in the headers."""
    holder, client = rig.holder().serving(), rig.client("billing")
    (account,) = accounts_of_partition(1)
    poison = [
        b"{malformed",
        b'{"v": 9, "type": "AccountReport"}',
        b"\x00\xff",
        b'{"v": 1, "type": "AccountReport", "client_id": "b", "incarnation": "i", "account": "\\u0000", "seq": 1}',
        b'"' + b"x" * 900_000 + b'"',
    ]
    for body in poison:
        client.send("anything", body, partition=1)
    client.send(b"\xff\x00 no text", b"poison", partition=1)
    client.report(account, waiting=1)
    served(holder, client, account)
    holder.until(lambda: rig.outbox_depth() == 0, "the outbox to be empty")
    letters = rig.messages(rig.settings.dead_letters_topic)
    assert len(letters) == len(poison) + 1
    assert {letter.value() for letter in letters} >= set(poison[:4])
    for letter in letters:
        headers = dict(letter.headers())
        assert headers["reason"]
        assert headers["topic"] == rig.settings.accounts_topic.encode()


def test_a_limit_outlives_the_account_and_the_holder(quick_rig: Rig) -> None:
    """Design, section 10: SetLimit is persisted, and mirrored to the limits topic."""
    rig = quick_rig
    holder, client = rig.holder().serving(), rig.client("billing")
    client.command(SetLimit(client_id="ops", account="acme", seq=1, limit=3, by="me", why="busy"))
    client.report("acme", waiting=0)
    holder.until(lambda: client.pump() and rig.usage("acme") is None, "the idle account to go")
    holder.until(lambda: rig.outbox_depth() == 0, "the outbox to be empty")
    mirrors = [message.value() for message in rig.messages(rig.settings.limits_topic)]
    assert mirrors
    assert b'"limit":3' in mirrors[-1]
    holder.crash()
    holder = rig.holder().serving()
    client.report("acme", waiting=9)
    for _ in range(3):
        served(holder, client, "acme")
    usage = rig.usage("acme")
    assert usage is not None
    assert usage.limit == 3
    client.command(Pause(client_id="ops", account="acme", seq=1))
    holder.until(lambda: (usage := rig.usage("acme")) and usage.paused, "the pause")


def test_a_forfeit_is_logged_with_its_account(quick_rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Design, section 8: who forfeited which client of which account, and why."""
    rig = quick_rig
    holder, client = rig.holder().serving(), rig.client("billing")
    client.report("acme", waiting=1)
    served(holder, client, "acme")
    usage = rig.usage("acme")
    assert usage is not None
    given = {"epoch": usage.epoch, "version": usage.version}
    client.command(Forfeit(client_id="ops", account="acme", seq=1, client="billing", **given, by="kim", why="gone"))
    holder.until(lambda: (usage := rig.usage("acme")) and usage.footprint == 0, "the forfeit")
    (said,) = [record.getMessage() for record in caplog.records if "forfeited" in record.getMessage()]
    assert said.startswith("account 'acme': client 'billing' is forfeited by 'kim' (gone): ")


def test_a_reply_that_nobody_answers_is_repeated_without_any_message(quick_rig: Rig) -> None:
    """Rule 5, and case A40: a lowering that was lost is said again within the repeat interval."""
    rig = quick_rig
    holder, first, second = rig.holder().serving(), rig.client("billing"), rig.client("shipping")
    first.command(SetLimit(client_id="ops", account="acme", seq=1, limit=2))
    first.report("acme", waiting=2)
    served(holder, first, "acme")
    served(holder, first, "acme")
    second.report("acme", waiting=1)
    holder.until(lambda: any(reply.ack_wanted for reply in first.pump()), "the lowering")
    lowered = first.replies[-1]
    holder.until(lambda: [reply for reply in first.pump() if reply.version >= lowered.version], "its repeat")
    first.release("acme")
    first.report("acme")
    served(holder, second, "acme")


def test_a_holder_that_dies_between_commit_and_reply(quick_rig: Rig) -> None:
    """Case A16: the reply is in the outbox; the next holder sends it; the lease is neither lost nor doubled."""
    rig = quick_rig
    client = rig.client("billing")
    holder = rig.holder()
    holder.sends = False
    holder.serving()
    client.report("acme", waiting=2)
    holder.until(lambda: rig.outbox_depth() == 1, "the commit")
    holder.crash()
    assert client.pump() == []
    holder = rig.holder()
    holder.until(client.pump, "the reply")
    assert client.claim("acme")
    client.report("acme")
    holder.until(lambda: (usage := rig.usage("acme")) and usage.in_use == 1, "the claim")
    usage = rig.usage("acme")
    assert usage is not None
    assert (usage.footprint, usage.waiting) == (1, 1)


def test_a_holder_that_dies_between_reply_and_outbox_delete(quick_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases A16 and B2: the reply goes out twice, and gives one permit."""
    rig = quick_rig
    client, holder = rig.client("billing"), rig.holder().serving()

    def crash(*_: object) -> None:
        raise InterruptedError("crash before the delete")

    client.report("acme", waiting=2)
    with monkeypatch.context() as patch:
        patch.setattr(outbox, "delivered", crash)
        with pytest.raises(InterruptedError):
            holder.until(lambda: None, "the crash")
        holder.crash()
    assert rig.outbox_depth() == 1
    with rig.database.transaction() as connection:
        # The dead relay's hold on the row ends.
        connection.execute(rig.tables.outbox.update().values(due_at=0))
    holder = rig.holder()
    holder.until(lambda: (client.pump(), len(client.replies) == 2)[1], "the reply, twice")
    assert client.replies[0] == client.replies[1]
    assert client.claim("acme")
    assert not client.claim("acme")
    client.report("acme")
    holder.until(lambda: (usage := rig.usage("acme")) and usage.in_use == 1, "the claim")
    usage = rig.usage("acme")
    assert usage is not None
    assert usage.footprint == 1


def test_of_two_holders_on_one_partition_the_older_commits_nothing(
    quick_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case A17: two groups stand for two members that both believe they own the partition."""
    rig = quick_rig
    client, older = rig.client("billing"), rig.holder().serving()
    newer = rig.holder(group_id=f"{rig.settings.group_id}-other").serving()
    client.report("acme", waiting=1)
    partition = partition_of("acme", PARTITIONS)
    read = older.reader.read

    def read_and_stand_still(timeout_s: float, limit: int) -> Any:
        batches = read(timeout_s, limit)
        if batches:
            newer.until(lambda: rig.usage("acme"), "the newer holder's commit")
        return batches

    monkeypatch.setattr(older.reader, "read", read_and_stand_still)
    older.until(lambda: rig.usage("acme"), "a commit")
    with rig.database.reading() as connection:
        before = store.load_rows(connection, rig.tables, ["acme"])["acme"]
    assert partition not in older.service.partitions, "it must drop the partition"
    assert partition in newer.service.partitions
    # It takes the partition again from where SQL is, and both go on.
    monkeypatch.undo()
    older.until(lambda: partition in older.service.partitions, "the partition again")
    with rig.database.reading() as connection:
        after = store.load_rows(connection, rig.tables, ["acme"])["acme"]
    assert after.version == before.version
    served(older, client, "acme")


def test_new_partitions_wake_the_relay(quick_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What their last owner left in the outbox when it died is sent at once."""
    holder, woken = quick_rig.holder(), threading.Event()
    monkeypatch.setattr(holder.service, "_wake_relay", woken.set)
    holder.serving()
    assert woken.is_set()


def test_an_account_whose_partition_changes_has_two_owners_for_a_while(quick_rig: Rig) -> None:
    """Cases A37 and B10: both go on after a reload, and the newest report wins."""
    rig = quick_rig
    client = rig.client("billing")
    one, other = rig.holder(), rig.holder()
    one.until(lambda: (other.step(), one.service.partitions and other.service.partitions)[1], "shares", 60)
    one.until(lambda: (other.step(), len(one.service.partitions | other.service.partitions) == PARTITIONS)[1], "all")
    ours, theirs = min(one.service.partitions), min(other.service.partitions)
    client.group("acme").waiting = 1
    for number in range(1, 21):
        client.report("acme", partition=ours if number % 2 else theirs)
        other.step()
        one.step()
    one.until(lambda: (other.step(), client.pump(), any(r.answers == 20 for r in client.replies))[2], "the last answer")
    usage = rig.usage("acme")
    assert usage is not None
    assert (usage.waiting + usage.in_use, usage.footprint) == (1, 1)


def test_nothing_is_lost_or_done_twice_while_partitions_move(quick_rig: Rig) -> None:
    """Case B9: holders come and go while reports flow; each is applied, and each partition's offset ends at its end."""
    rig = quick_rig
    client = rig.client("billing")
    holders = [rig.holder().serving()]
    accounts = [f"tenant:{number}" for number in range(60)]
    for turn in range(6):
        for account in accounts:
            client.report(account, waiting=turn + 1)
        if turn in (1, 3):
            holders.append(rig.holder())
        if turn == 4:
            holders.pop(0).crash()
        for _ in range(5):
            for holder in holders:
                holder.step()
    newest = {account: client.seq - len(accounts) + 1 + number for number, account in enumerate(accounts)}

    def answered() -> bool:
        for holder in holders[1:]:
            holder.step()
        client.pump()
        return client.answered == newest

    holders[0].until(answered, "all answers")
    assert sum(position.next_offset for position in rig.positions().values()) == 6 * len(accounts)


def test_one_account_that_fails_holds_back_no_other(quick_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases B13 and F5: a fault in one decision goes to the dead letters, and its timers rest."""
    rig = quick_rig
    holder, client = rig.holder().serving(), rig.client("billing")
    bad, good = accounts_of_partition(2, 2)
    client.report(bad, waiting=1)
    served(holder, client, bad)
    decide = semaphore.decide

    def faulty(state: Any, *rest: Any) -> Any:
        if state.account == bad:
            raise ZeroDivisionError
        return decide(state, *rest)

    monkeypatch.setattr(semaphore, "decide", faulty)
    client.report(bad)
    client.report(good, waiting=1)
    served(holder, client, good)
    holder.until(lambda: rig.messages(rig.settings.dead_letters_topic), "the dead letter")
    with rig.database.reading() as connection:
        row = store.load_rows(connection, rig.tables, [bad])[bad]
        now_ms = store.clock_ms(connection)
    assert row.due_at_ms is not None
    assert now_ms < row.due_at_ms <= now_ms + ledger.FAILED_ACCOUNT_PAUSE_MS


def test_a_lost_account_is_reloaded_within_the_batch(quick_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 7: an account that another wrote, with the partition still ours, costs one reload."""
    rig = quick_rig
    holder, client = rig.holder().serving(), rig.client("billing")
    client.report("acme", waiting=1)
    holder.until(client.pump, "a reply")
    with rig.database.transaction() as connection:
        row = store.load_rows(connection, rig.tables, ["acme"])["acme"]
        store.write_rows(
            connection, rig.tables, [store.rewrite(row, row.version + 1_000, row.state, due_at_ms=row.due_at_ms or 0)]
        )
    lost: list[VersionMoved] = []
    write_rows = store.write_rows

    def counting(*arguments: Any) -> None:
        try:
            write_rows(*arguments)
        except VersionMoved as error:
            lost.append(error)
            raise

    monkeypatch.setattr(store, "write_rows", counting)
    report = client.report("acme", waiting=2)
    holder.until(lambda: [reply for reply in client.pump() if reply.answers == report.seq], "its answer")
    assert lost
