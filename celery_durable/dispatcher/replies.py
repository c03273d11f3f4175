"""Reads this client's replies topic and applies each reply in the transaction that moves its offset."""

from __future__ import annotations

from typing import Protocol

from sqlalchemy import Connection

from celery_durable.permits.messages import AccountReply
from celery_durable.runtime import Runtime


class ReplySink(Protocol):
    """What the replies are for: :class:`celery_durable.dispatcher.passes.Passes`."""

    def apply_reply(self, connection: Connection, reply: AccountReply) -> None:
        """Brings the reply's account up to date in the caller's transaction."""

    def restored(self, connection: Connection) -> None:
        """The database was restored from a backup: voids all permits, before anything is admitted (section 8)."""


class ReplyReader:
    """The client's reader of replies: a member of the group ``celery-durable-<client_id>``. For one thread."""

    def __init__(self, runtime: Runtime, sink: ReplySink) -> None:
        raise NotImplementedError

    def step(self) -> float | None:
        """Waits up to a quarter of a second for replies and applies them (a :data:`~..scheduling.loop.Step`)."""
        raise NotImplementedError

    def close(self) -> None:
        """Leaves the group."""
        raise NotImplementedError
