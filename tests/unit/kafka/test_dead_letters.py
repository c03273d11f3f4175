"""What becomes of a message that cannot be read (case B7)."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from celery_durable.kafka.dead_letters import BODY_BYTES_MAX, dead_letter, why_unreadable
from celery_durable.kafka.received import Received
from celery_durable.kafka.settings import KafkaSettings
from celery_durable.permits.messages import read_reply


def received(key: bytes | None, value: bytes | None) -> Received:
    return Received("accounts", 3, 17, key, value, ())


def test_keeps_key_body_and_reason() -> None:
    letter = dead_letter(KafkaSettings(), received(b"acme", b"{"), "not JSON")
    assert (letter.topic, letter.key, letter.body, letter.slot) == ("celery-durable.dead-letters", "acme", b"{", None)
    assert letter.headers == {"reason": "not JSON", "topic": "accounts", "partition": "3", "offset": "17"}


def test_a_message_of_10_mb_is_cut() -> None:
    letter = dead_letter(KafkaSettings(), received(b"k", b"x" * 10_000_000), "r" * 10_000)
    assert len(letter.body) == BODY_BYTES_MAX
    assert letter.headers is not None
    assert letter.headers["truncated_from_bytes"] == "10000000"
    assert len(letter.headers["reason"]) == 500


@pytest.mark.parametrize(
    ("key", "kept"), [(None, ""), (b"", ""), (b"a\x00b", "a\\x00b"), (b"\xff", "\\xff"), (b"k" * 9_000, "k" * 2_000)]
)
def test_keys_that_no_text_column_holds(key: bytes | None, kept: str) -> None:
    assert dead_letter(KafkaSettings(), received(key, None), "why").key == kept


def test_the_reason_names_the_field_and_not_the_input() -> None:
    with pytest.raises(ValidationError) as found:
        read_reply(b'{"v": 9, "client_id": "hunter2", "epoch": "hunter2"}')
    reason = why_unreadable(found.value)
    assert reason.startswith("v: ")
    assert reason.endswith(" more")
    assert "hunter2" not in reason
    assert "\n" not in reason
