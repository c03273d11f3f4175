"""Messages of the accounts topic, sorted into those that accounts get and those that nobody can read."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from celery_durable.kafka.received import Received
from celery_durable.kafka.settings import KafkaSettings
from celery_durable.permits.messages import AccountReport, Pause
from holder_service import inbox
from holder_service.inbox import Unreadable


def received(value: bytes | None, key: bytes | None = b"acme", *, partition: int = 0, offset: int = 0) -> Received:
    return Received("celery-durable.accounts", partition, offset, key, value, ())


def report(**fields: Any) -> bytes:
    values = {"v": 1, "type": "AccountReport", "client_id": "billing", "incarnation": "i", "account": "acme", "seq": 1}
    return json.dumps({**values, **fields}).encode()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "no body"),
        (b"", "JSON"),
        (b"{not json", "JSON"),
        (b"\xff\xfe\x00", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b"7", "object"),
        (b'{"type": "Surprise"}', "Surprise"),
        (report(v=2), "v:"),
        (report(seq="3"), "seq"),
        (report(seq=-1), "seq"),
        (report(groups=[{"claimed": 1.5}]), "claimed"),
        (report(client_id="../etc"), "client_id"),
        (report(client_id="a b"), "client_id"),
        (report(filler="x" * 10_000_000), "bytes"),
        (report(account=""), "account"),
    ],
)
def test_what_cannot_be_read_is_told_apart_with_its_reason(value: bytes | None, reason: str) -> None:
    """Case B7: malformed JSON, wrong type, unknown ``v``, a huge message, a name that no topic can have."""
    found = inbox.read(received(value))
    assert isinstance(found, Unreadable)
    assert reason in found.reason
    assert len(found.reason) <= 500


@pytest.mark.parametrize("account", ["a\x00b", "x" * 1_024 + "é" * 500])
def test_an_account_that_no_database_stores_is_refused(account: str) -> None:
    """Case E5: it would otherwise fail its whole batch, for ever (case B13)."""
    found = inbox.read(received(report(account=account), account.encode()))
    assert isinstance(found, Unreadable)
    assert "account" in found.reason


@pytest.mark.parametrize("account", ["1", "1:2", 'Ä quote\'s "x"', "a" * 1_024, "  ", "ACME"])
def test_accounts_of_every_shape_are_taken(account: str) -> None:
    """Case E5."""
    found = inbox.read(received(report(account=account), account.encode()))
    assert isinstance(found, AccountReport)
    assert found.account == account


def test_a_key_that_is_not_the_account_is_refused() -> None:
    """Such a message would go to another partition than the account's others, out of their order."""
    found = inbox.read(received(report(), b"other"))
    assert isinstance(found, Unreadable)


def test_messages_keep_their_order_within_an_account() -> None:
    """A poison message between them fails alone (case B13)."""
    pause = b'{"v": 1, "type": "Pause", "client_id": "ops", "account": "acme", "seq": 1}'
    batch = [
        received(report(seq=1), offset=0),
        received(b"poison", offset=1),
        received(report(account="other", seq=5), b"other", partition=1, offset=9),
        received(pause, offset=2),
        received(report(seq=2), offset=3),
    ]
    found = inbox.sort(batch)
    assert [(type(m), m.seq) for m in found.letters["acme"].messages] == [
        (AccountReport, 1),
        (Pause, 1),
        (AccountReport, 2),
    ]
    assert found.letters["other"].partition == 1
    assert [unreadable.received.offset for unreadable in found.unreadable] == [1]
    second = found.letters["acme"].messages[2]
    assert found.letters["acme"].source_of(second) is batch[4]


def test_a_dead_letter_says_why_and_where_from(caplog: pytest.LogCaptureFixture) -> None:
    """Case B7: the reason is in the headers, and one line is in the log."""
    with caplog.at_level(logging.WARNING):
        letters = inbox.dead_letters(KafkaSettings(), [Unreadable(received(b"poison", offset=7), "not JSON")])
    assert [letter.topic for letter in letters] == ["celery-durable.dead-letters"]
    assert letters[0].body == b"poison"
    assert letters[0].headers is not None
    assert letters[0].headers["reason"] == "not JSON"
    assert letters[0].slot is None
    assert "offset 7: refused" in caplog.text
