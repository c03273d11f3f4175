"""One transaction's worth of accounts: load, decide, write by compare-and-set, stage what is to be sent (section 9)."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sqlalchemy import Connection

from celery_durable.permits.messages import LimitMirror
from celery_durable.store import counters, outbox
from celery_durable.store.outbox import Staged
from holder_service import inbox, life, semaphore, store
from holder_service.inbox import Letters, Unreadable
from holder_service.life import Life, LifeChanged
from holder_service.semaphore import AccountState, Decision, SemaphoreSettings
from holder_service.settings import HolderSettings
from holder_service.store import HolderTables, Row, Write

logger = logging.getLogger(__name__)

FAILED_ACCOUNT_PAUSE_MS = 30_000
"""An account whose decision failed (a bug) rests this long before its timers run again."""
REPLY_SLOT = "reply"
MIRROR_SLOT = "mirror"

MakeMissing = Callable[[str, int, LimitMirror | None], AccountState]
"""Makes the state of an account without a row: ``semaphore.new_account`` or ``semaphore.rebuilding_account``."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What a transaction did to its accounts. Hand it to :meth:`Ledger.remember` once it is committed."""

    now_ms: int
    kept: Sequence[Row] = ()
    gone: Collection[str] = ()

    @property
    def next_due_ms(self) -> int | None:
        """The earliest timer of these accounts, Unix ms."""
        return min((row.due_at_ms for row in self.kept if row.due_at_ms is not None), default=None)


@dataclass(slots=True)
class _Outcome:
    writes: list[Write] = field(default_factory=list)
    kept: list[Row] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    staged: list[Staged] = field(default_factory=list)
    mirrors: list[LimitMirror] = field(default_factory=list)


class Ledger:
    """The accounts of the partitions that this instance owns, cached, at most ``settings.cache_accounts_max``.

    A cached row may be stale where another holder wrote it: compare-and-set finds that out, :class:`VersionMoved` is
    raised, and after :meth:`forget` the next try reads it anew. For one thread.
    """

    def __init__(self, tables: HolderTables, settings: HolderSettings, decisions: SemaphoreSettings) -> None:
        self._tables = tables
        self._settings = settings
        self._decisions = decisions
        self._rows: OrderedDict[str, Row] = OrderedDict()

    def apply(
        self,
        connection: Connection,
        present: Life,
        work: Mapping[str, Letters],
        *,
        missing: MakeMissing = semaphore.new_account,
        refused_before: Mapping[int, int] | None = None,
    ) -> Applied:
        """Decides every account of ``work`` once, with its messages (none: its timers alone), and writes the outcome.

        :param missing: makes the state of an account that has no row.
        :param refused_before: by partition, the offset before which refused messages became dead letters long ago.
        :raises VersionMoved: another holder wrote one of the accounts: roll back, :meth:`forget` them, try again.
        :raises LifeChanged: the database began another life: roll back, and see what is to be done.
        """
        versions = counters.draw(connection, self._tables.counters, store.VERSION_COUNTER, max(1, len(work)))
        # The counter's row is locked from here on, by every holder and when a life changes: what is read now stays
        # true, also of accounts that have no row to compare and set.
        current = life.load(connection, self._tables)
        if current is None or current.revision != present.revision:
            raise LifeChanged
        rows = self._load(connection, work)
        absent = [account for account in work if account not in rows]
        mirrors = store.load_mirrors(connection, self._tables, absent)
        now_ms, outcome = current.now_ms, _Outcome()
        for (account, letters), version in zip(sorted(work.items()), versions, strict=False):
            row = rows.get(account)
            state = missing(account, current.epoch, mirrors.get(account)) if row is None else row.state
            try:
                decision = semaphore.decide(state, letters.messages, now_ms, version, self._decisions)
            except Exception:
                # One account's fault must not stop the partition (cases B13, F5): its clients repeat what they said.
                logger.exception("account %r: the decision failed; its messages go to the dead letters", account)
                self._set_aside(outcome, row, letters, now_ms, version)
                continue
            self._collect(outcome, row, letters, decision, version, refused_before or {})
        store.write_rows(connection, self._tables, outcome.writes)
        store.write_mirrors(connection, self._tables, outcome.mirrors)
        outbox.stage(connection, self._tables.outbox, outcome.staged)
        return Applied(now_ms, outcome.kept, outcome.gone)

    def remember(self, applied: Applied) -> None:
        """Keeps the rows of a committed transaction for the next one."""
        for row in applied.kept:
            self._rows[row.account] = row
            self._rows.move_to_end(row.account)
        for account in applied.gone:
            self._rows.pop(account, None)
        while len(self._rows) > self._settings.cache_accounts_max:
            self._rows.popitem(last=False)

    def forget(self, accounts: Iterable[str]) -> None:
        """Drops what is cached of ``accounts``."""
        for account in accounts:
            self._rows.pop(account, None)

    def forget_partitions(self, partitions: Collection[int]) -> None:
        """Drops what is cached of partitions that this instance no longer owns."""
        self.forget([row.account for row in self._rows.values() if row.partition in partitions])

    def clear(self) -> None:
        """Drops everything that is cached."""
        self._rows.clear()

    def _load(self, connection: Connection, accounts: Collection[str]) -> dict[str, Row]:
        rows = {account: self._rows[account] for account in accounts if account in self._rows}
        unknown = [account for account in accounts if account not in rows]
        rows.update(store.load_rows(connection, self._tables, unknown))
        return rows

    def _collect(
        self,
        outcome: _Outcome,
        row: Row | None,
        letters: Letters,
        decision: Decision,
        version: int,
        refused_before: Mapping[int, int],
    ) -> None:
        account = decision.state.account
        partition = letters.partition
        if decision.delete:
            if row is not None:
                outcome.writes.append(Write(account, row.version, None))
            outcome.gone.append(account)
        elif decision.changed or (
            row is not None and (row.partition, row.due_at_ms) != (partition, decision.due_at_ms)
        ):
            new = Row(account, partition, version, decision.due_at_ms, decision.state)
            outcome.writes.append(Write(account, None if row is None else row.version, new))
            outcome.kept.append(new)
        elif row is not None:
            outcome.kept.append(row)
        if decision.mirror is not None:
            outcome.mirrors.append(decision.mirror)
            outcome.staged.append(stage_mirror(self._settings, decision.mirror))
        for reply in decision.replies:
            topic, body = self._settings.replies_topic(reply.client_id), reply.to_bytes()
            outcome.staged.append(Staged(topic=topic, key=account, body=body, slot=REPLY_SLOT))
        for warning in decision.warnings:
            logger.warning("%s", warning)
        refused = [
            Unreadable(received, refusal.reason)
            for refusal in decision.refusals
            if (received := letters.source_of(refusal.message)) is not None
            and received.offset >= refused_before.get(received.partition, 0)
        ]
        outcome.staged += inbox.dead_letters(self._settings, refused)

    def _set_aside(self, outcome: _Outcome, row: Row | None, letters: Letters, now_ms: int, version: int) -> None:
        failed = [Unreadable(received, "the holder failed on it: see its log") for received in letters.received]
        outcome.staged += inbox.dead_letters(self._settings, failed)
        if row is not None:
            later = replace(row, version=version, due_at_ms=now_ms + FAILED_ACCOUNT_PAUSE_MS)
            outcome.writes.append(Write(row.account, row.version, later))
            outcome.kept.append(later)


def stage_mirror(settings: HolderSettings, mirror: LimitMirror) -> Staged:
    """The message that puts the account's commands into the limits topic, in place of an unsent older one."""
    return Staged(topic=settings.limits_topic, key=mirror.account, body=mirror.to_bytes(), slot=MIRROR_SLOT)
