"""The transactional outbox of a client or a holder: rows that the relay sends to Kafka and then deletes.

A row with a ``slot`` replaces the unsent one of the same (topic, key, slot): a newer report supersedes an older one
(rule 5). Rows are selected by being there, never by a cursor over their numbers, since commit order is not number
order (case B12). The relay holds no lock while it sends; it deletes a row only at the version that it sent (case B3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Connection,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)


def outbox_table(metadata: MetaData, prefix: str) -> Table:
    """The outbox under ``prefix``."""
    return Table(
        f"{prefix}outbox",
        metadata,
        Column("no", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
        Column("topic", String(255), nullable=False),
        Column("key", Text, nullable=False),
        Column("slot", Text, comment="null: never replaced"),
        Column("body", LargeBinary, nullable=False),
        Column("headers", JSON),
        Column(
            "version",
            BigInteger,
            nullable=False,
            server_default="1",
            comment="raised when the row is replaced",
        ),
        Column("failures", Integer, nullable=False, server_default="0"),
        Column("due_at", BigInteger, nullable=False, comment="Unix ms: when to send it (again)"),
        Column("staged_at", BigInteger, nullable=False),
        UniqueConstraint("topic", "key", "slot", name=f"{prefix}outbox_slot"),
        Index(f"{prefix}outbox_due", "due_at"),
        comment="Messages to Kafka, written in the transaction that they report",
    )


@dataclass(frozen=True, slots=True)
class Staged:
    """A message to stage. ``slot`` None: it replaces nothing."""

    topic: str
    key: str
    body: bytes
    slot: str | None = None
    headers: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A row that is due, as the relay claimed it."""

    no: int
    version: int
    topic: str
    key: str
    body: bytes
    headers: dict[str, str] | None
    failures: int
    staged_at_ms: int


def stage(connection: Connection, outbox: Table, messages: Sequence[Staged]) -> None:
    """Writes the messages in the caller's transaction; a rollback sends nothing (case B1)."""
    raise NotImplementedError


def claim(connection: Connection, outbox: Table, *, limit: int, hold_ms: int) -> list[Outgoing]:
    """Takes due rows for ``hold_ms``: until then no other relay sends them. Skips rows that are locked."""
    raise NotImplementedError


def delivered(connection: Connection, outbox: Table, sent: Sequence[Outgoing]) -> int:
    """Deletes rows whose delivery report came, each only at the version that was sent. Returns how many."""
    raise NotImplementedError


def failed(
    connection: Connection, outbox: Table, sent: Sequence[Outgoing], *, retry_min_ms: int, retry_max_ms: int
) -> None:
    """Makes rows due again later, backing off by their failures; holds back no other key (case B6)."""
    raise NotImplementedError


def depth(connection: Connection, outbox: Table) -> tuple[int, int]:
    """(rows waiting, age of the oldest in ms)."""
    raise NotImplementedError
