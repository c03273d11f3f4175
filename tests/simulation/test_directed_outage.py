"""Kafka away for longer than anything waits by itself, in virtual time, with production's own loops on both sides."""

from __future__ import annotations

from collections import Counter

import pytest

from celery_durable.permits.messages import AccountReport, read_account_message, read_reply
from celery_durable.store.schema import QUEUED, SUCCEEDED
from tests.simulation import wiring
from tests.simulation.run import simulator
from tests.simulation.services import TOPIC_PREFIX, Service
from tests.simulation.shells import ACCOUNTS_TOPIC, World

AWAY_MS = 600_000
EVERY_MS = 10_000
LEASED = ("tenant:acme", "tenant:bolt", "tenant:coil")
UNSEEN = ("tenant:new", "tenant:later")
LIMIT = 2


@pytest.fixture
def world():
    """One service and one holder, on which nothing arrives by itself and nothing goes wrong."""
    with simulator():
        world = World(0)
        wiring.use(world)
        world.accounts, world.groups, world.declared = [*LEASED, *UNSEEN], [""], {"limit": LIMIT}
        world.durations, world.races, world.work_left = (100, 2_000), False, 0
        world.service_count = world.holder_count = 1
        world.idle_return_s = 60.0
        world.begin()
        yield world


def states(service: Service, account: str) -> Counter[str]:
    """How many operations of the account are in each state."""
    return Counter(
        str(state)
        for (state,) in service.slot.rows(f"SELECT state FROM durable_operations WHERE account = '{account}'")
    )


def reports(world: World) -> list[tuple[int, AccountReport]]:
    """What services have reported: when it was in Kafka, and what."""
    found = [
        (stored.at_ms, read_account_message(stored.value))
        for log in world.bus.topics[ACCOUNTS_TOPIC].partitions
        for stored in log.messages
    ]
    return [(at_ms, message) for at_ms, message in found if isinstance(message, AccountReport)]


def answered_ms(world: World, service: Service, account: str, after_seq: int) -> int:
    """When the first reply was in Kafka that answers a report of the account above this number."""
    topic = world.bus.topics[f"{TOPIC_PREFIX}.replies.{service.client_id}"]
    found = [(stored.at_ms, read_reply(stored.value)) for log in topic.partitions for stored in log.messages]
    return min(at_ms for at_ms, reply in found if reply.account == account and reply.answers > after_seq)


def test_ten_minutes_without_kafka_end_in_one_report_an_account(world):
    """B5: enqueue, leased work and settles go on; new accounts wait; then each account says how it is now, once."""
    (service,) = world.services
    called: Counter[str] = Counter()

    def call(account: str, number: int) -> None:
        for _ in range(number):
            called[account] += 1
            service.enqueue(service.call(f"{account} {called[account]}", account, ""))

    for account in LEASED:
        call(account, 2)
    world.advance(5_000)
    assert all(states(service, account) == {SUCCEEDED: called[account]} for account in LEASED)
    assert not service.slot.rows("SELECT no FROM durable_outbox")
    newest = {report.account: report.seq for _, report in reports(world)}

    world.bus.is_down = True
    for turn in range(AWAY_MS // EVERY_MS):
        for account in LEASED:
            call(account, 1 + turn % (LIMIT + 1))
        if turn % 10 == 0:
            for account in UNSEEN:
                call(account, 1)
        world.advance(EVERY_MS)
        for account in LEASED:
            assert states(service, account) == {SUCCEEDED: called[account]}, "it goes on under its lease"
        for account in UNSEEN:
            assert states(service, account) == {QUEUED: called[account]}, "nothing is admitted without a permit"
        staged = service.slot.rows("SELECT key FROM durable_outbox")
        assert len(staged) == len(set(staged)), "one report an account, however long it waits"
    assert {account for (account,) in staged} == {*LEASED, *UNSEEN}
    assert {report.account: report.seq for _, report in reports(world)} == newest, "nothing has reached Kafka"

    back_ms = world.clock.now_ms
    world.kafka_back()
    world.advance(120_000)
    for account in (*LEASED, *UNSEEN):
        assert states(service, account) == {SUCCEEDED: called[account]}
        before_ms = answered_ms(world, service, account, newest.get(account, 0))
        told = [at_ms for at_ms, report in reports(world) if report.account == account and at_ms >= back_ms]
        assert len([at_ms for at_ms in told if at_ms <= before_ms]) == 1, "of ten minutes, before the first answer"
    assert not service.slot.rows("SELECT no FROM durable_outbox")
    world.invariants.require("bound", "level", "covers", "seq", "ack", "version")
