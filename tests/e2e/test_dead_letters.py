"""Messages that nobody can read, in the topics of a running holder and a running dispatcher (case B7)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from celery_durable.permits.messages import AccountReply, AccountReport, ReportGroup
from celery_durable.runtime import runtime_of
from tests.e2e.observe import Letter, all_read, holder_rows, read_topic, rows, set_topic_config, write_topic
from tests.harness import EMBEDDED, Service, Stack, wait_until

pytestmark = pytest.mark.processes

HUGE = {EMBEDDED: 2_000_000, "real": 10_000_000}
"""Bytes. The mock cluster keeps no more than 5 MiB of a partition."""
KEPT_BYTES_MAX = 200_000


@pytest.fixture(scope="module")
def service(module_stack: Stack) -> Service:
    service = module_stack.service()
    module_stack.holder()
    service.dispatcher()
    service.worker()
    return service


def document(message: AccountReport | AccountReply, **changed: Any) -> bytes:
    """The message with some fields changed."""
    return json.dumps({**json.loads(message.to_bytes()), **changed}).encode()


def refused(service: Service, topic: str) -> list[Letter]:
    """The dead letters of this topic, in the order of what they were read from."""
    settings = runtime_of(service.app).settings
    found = read_topic(service.stack.kafka, settings.dead_letters_topic)
    return sorted(
        (letter for letter in found if letter.headers["topic"] == topic),
        key=lambda letter: int(letter.headers["offset"]),
    )


def check(service: Service, topic: str, key: str, sent: Mapping[bytes, str]) -> None:
    """Every message is refused, for its reason, whole or its first part; and the partition goes on."""
    huge = {"message.max.bytes": 20_000_000} if any(len(body) > 900_000 for body in sent) else {}
    write_topic(service.stack.kafka, topic, [(key, body) for body in sent], **huge)
    assert service.task("work").delay(key).get(timeout=90) == key
    letters = wait_until(
        lambda: found if len(found := refused(service, topic)) == len(sent) else None, 60, what="all dead letters"
    )
    for letter, (body, reason) in zip(letters, sent.items(), strict=True):
        assert reason in letter.headers["reason"]
        assert letter.key == key
        assert letter.body == body[:KEPT_BYTES_MAX]
        assert (letter.headers.get("truncated_from_bytes") or str(len(body))) == str(len(body))
    assert len({letter.headers["partition"] for letter in letters}) == 1
    wait_until(lambda: all_read(service), 60, what="everything is read")


def test_the_holder_goes_on(service: Service) -> None:
    """Case B7: malformed JSON, a wrong type, an unknown ``v``, a 10 MB message, a client that can be none."""
    key, stack, topic = "tenant:dead", service.stack, runtime_of(service.app).settings.accounts_topic
    report = AccountReport(client_id="ghost", incarnation="one", account=key, seq=1, groups=(ReportGroup(waiting=1),))
    huge = HUGE[stack.kind]
    if stack.kafka.real:
        set_topic_config(stack.kafka, topic, max_message_bytes="20000000")
    sent = {
        b'{"v": 1, "type": "AccountRep': "Invalid JSON",
        b"\xff\xfe\x00": "Invalid JSON",
        document(report, seq="7"): "seq: Input should be a valid integer",
        document(report, seq=-1): "seq: Input should be greater than or equal to 0",
        document(report, v=2): "v: Input should be 1",
        document(report, type="Surprise"): "'Surprise' found using 'type'",
        document(report, client_id="no/topic"): "client_id: 'no/topic' cannot be part of a topic's name",
        document(report, account="tenant:elsewhere"): "the message's key is not its account",
        document(report, padding="x" * huge): f"bytes, more than {1_000_000}",
    }
    check(service, topic, key, sent)


def test_the_dispatcher_goes_on(service: Service) -> None:
    """Case B7: the same in a service's replies: also one for a client that is not this one."""
    key, topic = "tenant:dead-reply", runtime_of(service.app).settings.replies_topic(service.name)
    ((incarnation,),) = rows(service, "client", "incarnation")
    reply = AccountReply(
        client_id=service.name, incarnation=incarnation, account=key, epoch=2**62, version=2**62, answers=0
    )
    sent = {
        b"not JSON": "Invalid JSON",
        document(reply, groups=3): "groups: Input should be a valid",
        document(reply, v="1"): "v: Input should be 1",
        document(reply, client_id="crm"): "client_id: 'crm' is another client than this topic's",
    }
    check(service, topic, key, sent)


def test_a_client_that_nobody_knows_stalls_nobody(service: Service) -> None:
    """Cases B6 and B7: replies to a service that has no topic wait alone: everybody else goes on."""
    key, topic = "tenant:ghost", runtime_of(service.app).settings.accounts_topic
    ghost = AccountReport(
        client_id="ghost",
        incarnation="one",
        account=key,
        seq=1,
        groups=(ReportGroup(waiting=1),),
    )
    write_topic(service.stack.kafka, topic, [(key, document(ghost, some_newer_field="ignored"))])
    wait_until(lambda: (key,) in holder_rows(service.stack, "accounts", "account"), 60, what="the ghost's account")
    assert service.task("work").delay("tenant:another").get(timeout=60) == "tenant:another"
