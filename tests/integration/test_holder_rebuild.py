"""A holder whose database was lost or went back in time: a new epoch, and no permit too many (design, section 8)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient  # type: ignore[attr-defined]

from celery_durable.kafka.received import Received
from celery_durable.permits.messages import LimitMirror, SetLimit, read_limit_mirror
from holder_service import commands, ledger, life, rebuild, store
from holder_service.commands import CommandRefused
from holder_service.life import Life
from tests.harness import Kafka, wait_until
from tests.integration.holder_rig import DEADLINE_S, Client, Instance, Rig

LOST: dict[str, Any] = {}


@pytest.fixture
def rig(database_url: str, kafka: Kafka) -> Iterator[Rig]:
    """Both databases, on the test run's Kafka."""
    rig = Rig(database_url, kafka, batch_max=5)
    yield rig
    rig.close()


def present_life(rig: Rig) -> Life:
    """The database's row."""
    with rig.database.reading() as connection:
        found = life.load(connection, rig.tables)
    assert found is not None
    return found


def settled(rig: Rig, holder: Instance, account: str, in_use: int) -> None:
    """Steps until the holder knows of what is in use, and nothing is left to send."""
    holder.until(
        lambda: (usage := rig.usage(account)) and usage.in_use == in_use and rig.outbox_depth() == 0, "the claims"
    )


def two_clients_at_work(rig: Rig, holder: Instance) -> tuple[Client, Client]:
    """Limit 3: one client uses 2, the other 1, and both want more."""
    first, second = rig.client("billing"), rig.client("shipping")
    first.command(SetLimit(client_id="ops", account="acme", seq=1, limit=3))
    first.report("acme", waiting=2)
    for _ in range(2):
        holder.until(lambda: first.try_to_claim("acme"), "a permit")
    second.report("acme", waiting=1)
    holder.until(lambda: (first.try_to_claim("acme"), second.try_to_claim("acme"))[1], "a permit")
    first.report("acme", waiting=4)
    second.report("acme", waiting=4)
    settled(rig, holder, "acme", 3)
    for client in (first, second):
        client.pump()
    return first, second


def steps(holder: Instance, count: int = 40) -> None:
    """Some steps, for what should not happen."""
    for _ in range(count):
        holder.step()


@pytest.mark.parametrize("restored", [False, True], ids=["lost", "restored"])
def test_a_database_that_was_lost_or_restored_gives_nothing_before_all_have_acknowledged(
    rig: Rig, restored: bool
) -> None:
    """Case A18: never over the limit, and the limit itself is found again."""
    holder = rig.holder().serving()
    early = rig.client("billing")
    early.report("other", waiting=0)
    holder.until(early.pump, "a reply")
    backup = rig.snapshot() if restored else LOST
    early.close()
    first, second = two_clients_at_work(rig, holder)
    epoch = present_life(rig).epoch
    holder.crash()

    rig.restore(backup)
    holder = rig.holder()
    holder.until(lambda: holder.service.life and holder.service.partitions, "the rebuild")
    assert present_life(rig).epoch > epoch
    usage = rig.usage("acme")
    assert usage is not None
    assert (usage.limit, usage.in_use) == (3, 3)
    assert all(client.must_acknowledge for client in usage.clients)

    # One ends its operations and acknowledges: while the other is silent, nothing is given.
    for _ in range(2):
        first.release("acme")
    holder.until(lambda: any(reply.ack_wanted for reply in first.pump()), "the question")
    first.report("acme")
    steps(holder)
    first.pump()
    assert not first.claim("acme")
    # The other acknowledges: the limit is used, and not passed.
    holder.until(lambda: any(reply.ack_wanted for reply in second.pump()), "the question")
    second.report("acme")
    in_use = lambda: first.group("acme").in_use + second.group("acme").in_use  # noqa: E731

    def use_all() -> bool:
        for client in (first, second):
            client.try_to_claim("acme")
            rig.look([first, second], ["acme"], limit=3)
        return in_use() == 3

    holder.until(use_all, "the limit in use")
    steps(holder)
    use_all()


def test_a_database_that_is_lost_twice_before_anyone_acknowledged(rig: Rig) -> None:
    """Case A18: each time a later epoch, and what is in use stays counted."""
    holder = rig.holder().serving()
    first, second = two_clients_at_work(rig, holder)
    epochs = [present_life(rig).epoch]
    for _ in range(2):
        holder.crash()
        rig.restore(LOST)
        holder = rig.holder().serving()
        epochs.append(present_life(rig).epoch)
    assert epochs == sorted(set(epochs))
    first.release("acme")
    for client in (first, second):
        holder.until(lambda client=client: any(r.epoch == epochs[-1] for r in client.pump()), "the question")  # type: ignore[misc]
        client.report("acme")
    holder.until(lambda: first.try_to_claim("acme") or second.try_to_claim("acme"), "a permit")
    assert first.group("acme").in_use + second.group("acme").in_use == 3


def test_an_old_copy_of_the_moment_in_which_a_rebuild_began_gets_an_epoch_of_its_own(rig: Rig) -> None:
    """Case A18: the life that went on from it has given permits under the epoch that the copy names, of which nobody's
    acknowledgement is in the topic yet."""
    client = rig.client("billing")
    rig.restore(LOST)
    with rig.database.transaction() as connection:
        life.begin(connection, rig.tables, "rebuilding")
    backup = rig.snapshot()
    holder = rig.holder().serving()
    client.report("acme", waiting=1)
    holder.until(lambda: any(group.permits for reply in client.pump() for group in reply.groups), "a lease")
    epoch = present_life(rig).epoch
    holder.crash()
    rig.restore(backup)
    rig.holder().serving()
    assert present_life(rig).epoch > epoch


def test_the_operator_ends_the_wait_for_a_client_that_will_not_come(rig: Rig) -> None:
    """Design, section 8: `holder-service go`."""
    holder = rig.holder().serving()
    first, _gone = two_clients_at_work(rig, holder)
    holder.crash()
    rig.restore(LOST)
    holder = rig.holder().serving()
    holder.until(lambda: any(reply.ack_wanted for reply in first.pump()), "the question")
    first.report("acme")
    first.release("acme")
    first.report("acme")
    steps(holder)
    first.pump()
    assert not first.claim("acme")
    with pytest.raises(CommandRefused, match="nobody"):
        commands.go(rig.database, rig.tables, "nobody")
    assert commands.go(rig.database, rig.tables, "acme") == 1
    assert commands.go(rig.database, rig.tables, None) == 0
    holder.until(lambda: first.try_to_claim("acme"), "a permit")


def test_database_and_topic_lost_together_wait_for_the_operator(rig: Rig) -> None:
    """Design, section 8: where the topic was lost with the database, nobody knows what was given."""
    if not rig.kafka.real:
        pytest.skip("the mock cluster deletes no records")
    holder, client = rig.holder().serving(), rig.client("billing")
    client.report("acme", waiting=1)
    holder.until(client.pump, "a reply")
    holder.crash()
    admin = AdminClient({"bootstrap.servers": rig.kafka.bootstrap_servers})
    topic = rig.settings.accounts_topic
    for future in admin.delete_records([TopicPartition(topic, number, -1) for number in range(4)]).values():
        future.result(30)
    rig.restore(LOST)
    holder = rig.holder()
    holder.until(lambda: present_life(rig).phase == "topic_lost" if holder.step() is None else None, "the finding")
    client.report("acme", waiting=2)
    steps(holder, 5)
    assert holder.service.life is None
    assert rig.usage("acme") is None
    with pytest.raises(CommandRefused, match="--all"):
        commands.go(rig.database, rig.tables, "acme")
    assert commands.go(rig.database, rig.tables, None) == 0
    holder.until(lambda: client.try_to_claim("acme"), "a permit")


def test_a_rebuilder_that_dies_is_followed_by_another(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL in the middle of a rebuild: the next one begins again, in a later epoch, and is complete."""
    holder, client = rig.holder().serving(), rig.client("billing")
    accounts = [f"tenant:{number}" for number in range(30)]
    for account in accounts:
        client.report(account, waiting=2)
    holder.until(lambda: (client.pump(), len(client.answered) == len(accounts))[1], "all answers")
    holder.crash()
    rig.restore(LOST)
    apply, calls = ledger.Ledger.apply, []

    def dies(*arguments: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise InterruptedError("crash in the rebuild")
        return apply(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(ledger.Ledger, "apply", dies)
        holder = rig.holder()
        with pytest.raises(InterruptedError):
            holder.until(lambda: None, "the crash")
        holder.crash()
    broken = present_life(rig)
    assert broken.phase == "rebuilding"
    with pytest.raises(CommandRefused, match="still being rebuilt"):
        commands.go(rig.database, rig.tables, None)
    rig.holder().serving()
    found = present_life(rig)
    assert (found.phase, found.rebuild) == ("ready", None)
    assert found.epoch > broken.epoch
    rows = {usage.account: usage for usage in commands.usages(rig.database, rig.tables, rig.settings.semaphore())}
    assert sorted(rows) == sorted(accounts)
    with rig.database.reading() as connection:
        states = store.load_rows(connection, rig.tables, accounts).values()
    assert {row.state.epoch for row in states} == {found.epoch}


def test_of_instances_that_find_the_database_lost_one_rebuilds(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """The database's row decides by compare-and-set; the others wait, then share the partitions."""
    holder, client = rig.holder().serving(), rig.client("billing")
    for number in range(20):
        client.report(f"tenant:{number}", waiting=1)
    holder.until(lambda: (client.pump(), len(client.answered) == 20)[1], "all answers")
    holder.crash()
    rig.restore(LOST)
    holders = [rig.holder() for _ in range(3)]
    all_serve = threading.Event()

    def work(holder: Instance) -> None:
        holder.until(all_serve.is_set, "all to serve")

    with caplog.at_level("WARNING"):
        threads = [threading.Thread(target=work, args=(holder,)) for holder in holders]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: all(holder.service.partitions for holder in holders), DEADLINE_S, what="all to serve")
        finally:
            all_serve.set()
            for thread in threads:
                thread.join(30)
    assert sum("rebuilt in" in record.message for record in caplog.records) == 1
    assert present_life(rig).phase == "ready"


def test_limits_come_back_from_their_own_topic(rig: Rig) -> None:
    """Design, section 8: commands older than the accounts topic are in the mirror, which a rebuild reads first."""
    client = rig.client("billing")
    mirrors = [LimitMirror(account="acme", limit=9), LimitMirror(account="acme", limit=2, seqs={"ops/SetLimit": 7})]
    client.send("acme", mirrors[0].to_bytes(), topic=rig.settings.limits_topic)
    client.send("acme", b"unreadable", topic=rig.settings.limits_topic)
    client.send("acme", mirrors[1].to_bytes(), topic=rig.settings.limits_topic)
    client.report("acme", waiting=5)
    holder = rig.holder().serving()
    client.command(SetLimit(client_id="ops", account="acme", seq=6, limit=8))
    for _ in range(2):
        holder.until(lambda: client.try_to_claim("acme"), "a permit")
    usage = rig.usage("acme")
    assert usage is not None
    assert usage.limit == 2, "and an older copy of the command stays ignored"


def test_a_restored_database_takes_newer_commands_from_the_limits_topic(rig: Rig) -> None:
    """Commands newer than the copy may be gone from the accounts topic: the mirror has them, and keeps them."""
    holder, client = rig.holder().serving(), rig.client("billing")
    holder.sends = False
    client.command(SetLimit(client_id="ops", account="acme", seq=1, limit=3))
    client.report("acme", waiting=1)
    holder.until(lambda: (usage := rig.usage("acme")) and usage.waiting == 1, "the report")
    backup = rig.snapshot()
    assert rig.outbox_depth() > 0, "the copy has the older mirror among what it would send"
    client.report("acme", waiting=2)
    holder.until(lambda: (usage := rig.usage("acme")) and usage.waiting == 2, "the report")
    holder.crash()
    newer = LimitMirror(account="acme", limit=2, paused=True, seqs={"ops/SetLimit": 7, "ops/Pause": 8})
    client.send("acme", newer.to_bytes(), topic=rig.settings.limits_topic)
    rig.restore(backup)
    holder = rig.holder().serving()
    usage = rig.usage("acme")
    assert usage is not None
    assert (usage.limit, usage.paused) == (2, True)
    holder.until(lambda: rig.outbox_depth() == 0, "an empty outbox")
    newest = rig.messages(rig.settings.limits_topic)[-1]
    assert read_limit_mirror(newest.value()) == newer


def test_a_rebuilder_that_reads_for_long_is_not_taken_for_dead(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several instances each would else take over from the other, and none would ever be done."""
    client = rig.client("billing")
    client.report("acme", waiting=1)
    for number in range(3):
        client.send("acme", LimitMirror(account="acme", limit=number).to_bytes(), topic=rig.settings.limits_topic)
    revisions, read_to_end = [], rebuild.read_to_end

    def noted(*arguments: Any, **more: Any) -> Iterator[Received]:
        for received in read_to_end(*arguments, **more):
            revisions.append(present_life(rig).revision)
            yield received

    monkeypatch.setattr(rebuild, "ALIVE_EVERY_S", 0.0)
    monkeypatch.setattr(rebuild, "read_to_end", noted)
    rig.holder().serving()
    assert len(revisions) > 3
    assert sorted(set(revisions)) == revisions


def test_an_acknowledged_epoch_is_never_reached_again(rig: Rig) -> None:
    """The new epoch is above any that the topic's reports acknowledge, whatever the clock says."""
    holder, client = rig.holder().serving(), rig.client("billing")
    client.report("acme", waiting=1)
    holder.until(client.pump, "a reply")
    client.report("acme")
    settled(rig, holder, "acme", 0)
    holder.crash()
    ahead = present_life(rig).epoch + 10**9
    client.view("acme").ack = client.view("acme").ack.model_copy(update={"epoch": ahead})  # type: ignore[union-attr]
    client.report("acme")
    rig.restore(LOST)
    holder = rig.holder().serving()
    assert present_life(rig).epoch > ahead
    holder.until(lambda: any(reply.epoch > ahead for reply in client.pump()), "a reply above the acknowledged epoch")
