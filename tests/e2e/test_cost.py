"""What an operation costs: rows, and real messages in Kafka."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from celery_durable.runtime import runtime_of
from tests.e2e.observe import (
    History,
    all_read,
    forgotten,
    messages,
    operation,
    outbox_depth,
    read_topic,
    replies,
    reports,
    rows,
    table_sizes,
    topic_size,
    wait_ended,
    write_topic,
)
from tests.harness import Service, Stack, wait_until

pytestmark = pytest.mark.processes


@dataclass
class Running:
    """Two services under one holder."""

    stack: Stack
    forgetful: Service
    """Gives an unused lease back at once."""
    warm: Service
    """Keeps what it has."""


@pytest.fixture(scope="module")
def running(module_stack: Stack) -> Running:
    forgetful = module_stack.service("billing", idle_return_s=0.5)
    warm = module_stack.service("crm", idle_return_s=600.0)
    module_stack.holder()
    for service in (forgetful, warm):
        service.dispatcher()
        service.worker()
    # The first message waits for consumer groups to form, and is repeated meanwhile: no test here counts those.
    for service in (forgetful, warm):
        service.task("work").delay(f"first:{service.name}").get(timeout=60)
    wait_until(lambda: forgotten(forgetful, f"first:{forgetful.name}"), what="quiet")
    return Running(module_stack, forgetful, warm)


def sizes(service: Service) -> list[int]:
    """How many messages were ever sent, by topic."""
    settings = runtime_of(service.app).settings
    topics = (settings.accounts_topic, settings.replies_topic(service.name), settings.limits_topic)
    return [topic_size(service.stack.kafka, topic) for topic in topics]


def test_without_an_account_it_writes_its_own_rows_and_sends_nothing(running: Running) -> None:
    """No permit machinery is paid for: one row of its own, one of its payload, no message."""
    service = running.forgetful
    wait_until(lambda: all_read(service), what="quiet")
    before, sent = table_sizes(service), sizes(service)
    results = [service.task("add").delay(number, 1) for number in range(10)]
    assert [result.get(timeout=60) for result in results] == [number + 1 for number in range(10)]
    own = {"durable_operations", "durable_payloads"}
    assert table_sizes(service) == {name: count + 10 * (name in own) for name, count in before.items()}
    assert sizes(service) == sent


def test_a_first_operation_costs_four_messages_in_its_life(running: Running) -> None:
    """Case A21: admitted after one report and one reply; then the account is forgotten on both sides, and comes back.

    Old copies of everything that was said in its earlier life change nothing and leave no phantom.
    """
    service, account = running.forgetful, "tenant:once"
    wait_until(lambda: all_read(service), what="quiet")
    sent = sizes(service)
    first = service.task("work").delay(account)
    assert first.get(timeout=60) == account
    wait_until(lambda: forgotten(service, account), what="both sides have forgotten the account")
    said, answered = reports(service, account), replies(service, account)
    assert len(said) <= 2
    assert len(answered) <= 2
    assert sum(sizes(service)) - sum(sent) == len(said) + len(answered)
    assert said[0]["groups"][0]["waiting"] == 1
    assert answered[0]["answers"] == said[0]["seq"]
    assert answered[0]["groups"][0]["permits"] >= 1

    settings, kafka = runtime_of(service.app).settings, running.stack.kafka
    for topic in (settings.accounts_topic, settings.replies_topic(service.name)):
        copies = [(letter.key, letter.body) for letter in read_topic(kafka, topic, account)]
        write_topic(kafka, topic, copies + copies[::-1])
    wait_until(lambda: forgotten(service, account), what="the copies are forgotten too")

    again = [service.task("work").delay(account, 0.05) for _ in range(6)]
    assert [result.get(timeout=60) for result in again] == [account] * 6
    history = History([service])
    history.check_bound(2, account=account)
    assert set(history.starts(account).values()) == {1}
    wait_until(lambda: forgotten(service, account), what="the account comes and goes")


def test_a_spare_permit_serves_the_next_operation_with_no_message(running: Running) -> None:
    """Case A3, and A6: a claim within a lease sends nothing, and ``permits`` is never passed at any instant."""
    service, account = running.warm, "tenant:warm"
    work, flag = service.task("work"), running.stack.folder / "go"
    held = service.task("until").delay(account, str(flag))
    wait_until(lambda: operation(service, held.id).state == "running", what="the first one runs")
    wait_until(lambda: all_read(service), what="quiet")
    cost, (state,) = messages(service, account), rows(service, "accounts", "state", account=account)
    for _ in range(20):
        assert work.delay(account).get(timeout=60) == account
    assert outbox_depth(service) == 0
    assert messages(service, account) == cost
    flag.touch()
    held.get(timeout=60)
    for _ in range(5):
        assert work.delay(account).get(timeout=60) == account
    assert messages(service, account) == cost
    assert rows(service, "accounts", "state", account=account) != [state]  # it claimed, and told nobody

    burst = [work.delay(account, 0.05) for _ in range(10)]
    wait_ended(service, account, 26 + len(burst))
    history = History([service])
    history.check_bound(2, account=account)
    assert set(history.starts(account).values()) == {1}


def test_a_lone_client_works_on_its_lease(running: Running) -> None:
    """Case A34: with more waiting than its limit it sends no message an operation."""
    service, account = running.warm, "tenant:backlog"
    task = service.task("work")
    task.enqueue_many([(account, 0.005)] * 200)
    wait_ended(service, account, 200)
    wait_until(lambda: all_read(service), what="quiet")
    assert messages(service, account) <= 20
    History([service]).check_bound(2, account=account)
