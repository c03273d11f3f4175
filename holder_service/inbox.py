"""What came from Kafka, sorted into messages for accounts and messages that nobody can read (case B7).

A message that cannot be read goes to the dead-letter topic with the reason in its headers, and the partition goes on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import ValidationError

from celery_durable.kafka.dead_letters import dead_letter, why_unreadable
from celery_durable.kafka.received import Received
from celery_durable.kafka.settings import CLIENT_ID_CHARACTERS_MAX, NAME_CHARACTERS, KafkaSettings
from celery_durable.permits.messages import AccountReport, Command, read_account_message
from celery_durable.store.outbox import Staged

MESSAGE_BYTES_MAX = 1_000_000
"""A longer message is refused unread: a report of 200 waiting groups with names of 1,024 characters is far below."""
ACCOUNT_BYTES_MAX = 2_000
"""PostgreSQL indexes no key above about 2,700 bytes, and the account shares one with the topic and the slot."""
_CLIENT_ID = re.compile(rf"[{NAME_CHARACTERS}]{{1,{CLIENT_ID_CHARACTERS_MAX}}}", re.ASCII)

AccountMessage = AccountReport | Command


@dataclass(slots=True)
class Letters:
    """One account's messages in a batch, in order, each beside what it was read from."""

    partition: int
    messages: list[AccountMessage] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)

    def source_of(self, message: AccountMessage) -> Received | None:
        """What ``message`` was read from."""
        for candidate, received in zip(self.messages, self.received, strict=True):
            if candidate is message:
                return received
        return None


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A message that was refused, and why."""

    received: Received
    reason: str


@dataclass(frozen=True, slots=True)
class Inbox:
    """A batch, sorted."""

    letters: Mapping[str, Letters]
    unreadable: Sequence[Unreadable]


def sort(batch: Sequence[Received]) -> Inbox:
    """Reads every message of the batch. Never raises: what cannot be read is in ``unreadable``."""
    letters: dict[str, Letters] = {}
    unreadable: list[Unreadable] = []
    for received in batch:
        message = read(received)
        if isinstance(message, Unreadable):
            unreadable.append(message)
            continue
        # The newest partition wins: where the number of partitions was raised, it is the one that goes on.
        of_account = letters.setdefault(message.account, Letters(received.partition))
        of_account.partition = max(of_account.partition, received.partition)
        of_account.messages.append(message)
        of_account.received.append(received)
    return Inbox(letters, unreadable)


def read(received: Received) -> AccountMessage | Unreadable:
    """One message, or why it is none."""
    body = received.value
    if body is None:
        return Unreadable(received, "the message has no body")
    if len(body) > MESSAGE_BYTES_MAX:
        return Unreadable(received, f"the message has {len(body)} bytes, more than {MESSAGE_BYTES_MAX}")
    try:
        message = read_account_message(body)
    except ValidationError as error:
        return Unreadable(received, why_unreadable(error))
    reason = _refuse(message, received)
    return message if reason is None else Unreadable(received, reason)


def dead_letters(settings: KafkaSettings, refused: Sequence[Unreadable]) -> list[Staged]:
    """The refused messages as they go to the dead-letter topic, and a line each in the log."""
    return [dead_letter(settings, letter.received, letter.reason) for letter in refused]


def _refuse(message: AccountMessage, received: Received) -> str | None:
    account = message.account
    if "\x00" in account:
        return "account: holds a NUL character, which no database stores"
    if len(account.encode()) > ACCOUNT_BYTES_MAX:
        return f"account: {len(account.encode())} bytes, more than {ACCOUNT_BYTES_MAX}"
    if received.key != account.encode():
        return "the message's key is not its account: other messages of the account go to another partition"
    if not _CLIENT_ID.fullmatch(message.client_id):
        return (
            f"client_id: {message.client_id[:120]!r} cannot be part of a topic's name (letters, digits, '.', '_', '-')"
        )
    return None
