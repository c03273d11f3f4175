"""The client's passes: bring accounts up to date, each batch in one transaction (design, section 7).

The decisions are made by :mod:`celery_durable.permits.queue`, without I/O. This is the shell around them: it locks the
accounts' rows, reads what the core needs while it holds the locks, admits the operations, and stages the reports.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import Connection

from celery_durable.dispatcher.failures import Failures, is_no_accounts, together_or_one_by_one
from celery_durable.kafka.throttle import Throttled
from celery_durable.permits.messages import AccountReply
from celery_durable.permits.queue import (
    AccountState,
    GroupCounts,
    Outcome,
    Plan,
    QueueSettings,
    finish,
    new_account,
    plan,
    seal,
)
from celery_durable.runtime import Runtime
from celery_durable.store import counters, outbox
from celery_durable.store.account_sql import REPORT_SEQ
from celery_durable.store.accounts import Accounts, AccountWrite, client_identity
from celery_durable.store.admission import Admission, Admitted
from celery_durable.store.sending import Resends

logger = logging.getLogger(__name__)

REPORT_SLOT = "report"
"""Outbox slot of an account's report: a newer one replaces the unsent one."""
LOCKED_ROWS_PAUSE_MS = 1_000
"""When an account is looked at again after others held rows that could have been admitted (case A36)."""
REST, REST_MAX_S = 2.0, 0.05
"""A pass of several accounts is followed by a rest of so many times as long as it took, up to a maximum."""
CONTENTION_PAUSE_S = 0.02
"""Pause when other dispatchers hold every account that needs a pass."""

_DEFAULTS = QueueSettings(client_id="", incarnation="")

HandOver = Callable[[Sequence[Admitted]], None]
"""Takes what was admitted, after the commit. It must not fail, and may forget: what is not sent is sent later."""
AfterCommit = Callable[[], None]
"""To be called once the transaction is committed, and not if it is rolled back."""


@dataclass(slots=True)
class _Batch:
    """What one transaction did with its accounts."""

    done: int = 0
    """Accounts that were brought up to date: neither locked by others nor failed."""
    admitted: list[Admitted] = field(default_factory=list)
    staged: int = 0
    """Messages that wait in the outbox now."""
    failed: dict[str, Exception] = field(default_factory=dict)


def _forget(admitted: Sequence[Admitted]) -> None:
    """For a process without a delivery of its own: another one sends when the resend time has come."""


def _nothing() -> None:
    """For a process without a relay of its own."""


class Passes:
    """Brings accounts up to date. Any number of processes may do so for one database: they share by row locks.

    :param hand_over: takes admitted operations to the delivery, after the commit.
    :param on_staged: called after the commit of new messages in the outbox.
    """

    def __init__(
        self, runtime: Runtime, *, hand_over: HandOver = _forget, on_staged: Callable[[], None] = _nothing
    ) -> None:
        self._runtime = runtime
        self._settings = runtime.settings
        self._tables = runtime.tables
        self._database = runtime.database
        self._hand_over = hand_over
        self._on_staged = on_staged
        self._core: QueueSettings | None = None
        self._accounts = Accounts(
            runtime.tables, runtime.database.dialect, waiting_count_max=_DEFAULTS.waiting_count_max
        )
        self._admission = Admission(runtime.tables, runtime.database.dialect, Resends.of(runtime.settings))
        self._after = ""
        self._several = False
        """The newest step has brought several accounts up to date, and found no more than it took."""
        self._failures = Failures()
        self._other_databases = Throttled(logger)

    def step(self) -> float | None:
        """One batch of accounts that have wakes or are due (a :data:`~celery_durable.scheduling.loop.Step`).

        Accounts that another dispatcher is at are left to it; one that fails is tried again later, alone (case F5).
        """
        limit = self._settings.pass_accounts_max
        # So many of those found may be resting after a failure: they must not take the place of others.
        resting = self._failures.resting
        due_max = max(1, limit // 2)
        with self._database.autocommit() as connection:
            pending = self._accounts.pending(
                connection, due_max=due_max + resting, after=self._after, woken_max=limit + resting
            )
        due = self._failures.ready(pending.due)[:due_max]
        most = max(1, limit - len(due)) + resting
        woken = pending.woken[:most]
        chosen = self._failures.ready(dict.fromkeys([*due, *woken]))
        self._failures.forget_all_but({*pending.due, *woken})
        # Only where more were woken than one batch takes does it matter with which the next one begins.
        self._after = woken[-1] if len(woken) >= most else ""
        if not chosen:
            return min([pending.next_s, *self._failures.pauses_s()])

        def in_one_transaction(one_by_one: bool) -> _Batch:
            with self._database.transaction("passes.step") as transaction:
                return self._bring_up_to_date(transaction, chosen, {}, one_by_one=one_by_one)

        batch = together_or_one_by_one(in_one_transaction)
        self._several = batch.done > 1 and len(due) < due_max and not self._after
        self._committed(batch)
        self._failures.note(chosen, batch.failed)
        return None if batch.done else CONTENTION_PAUSE_S

    def rest_s(self, took_s: float) -> float:
        """How long to rest after a step that took so long: where several accounts are busy, the next pass takes more of
        them at once and costs hardly more. None after one account by itself, nor where more wait than one step takes.
        """
        return min(REST_MAX_S, REST * took_s) if self._several else 0.0

    def apply_replies(
        self, connection: Connection, replies: Sequence[AccountReply], *, one_by_one: bool
    ) -> AfterCommit:
        """Applies the holder's replies in the caller's transaction, waiting for the accounts' locks.

        Of several replies for one account only the newest counts, as if the others had been lost (rule 5). To be
        called once in a transaction, before it touches another row that passes write: all locks are taken in one order.

        :param one_by_one: a reply that fails is logged and skipped, since the holder repeats it until it is
            acknowledged; else it fails all of them (see :func:`together_or_one_by_one`).
        """
        newest: dict[str, AccountReply] = {}
        core = self._core_settings(connection)
        for reply in replies:
            if (reply.client_id, reply.incarnation) != (core.client_id, core.incarnation):
                self._tell_of_another_database(reply, core)
                continue
            known = newest.get(reply.account)
            if known is None or _age(reply) >= _age(known):
                newest[reply.account] = reply
        if not newest:
            return lambda: None
        batch = self._bring_up_to_date(connection, sorted(newest), newest, one_by_one=one_by_one)
        for account, error in batch.failed.items():
            logger.error("account %r: its reply was not applied: %s: %s", account, type(error).__name__, error)
        return lambda: self._committed(batch)

    def _committed(self, batch: _Batch) -> None:
        self._hand_over(batch.admitted)
        if batch.staged:
            self._on_staged()

    def _tell_of_another_database(self, reply: AccountReply, core: QueueSettings) -> None:
        # Old ones are read once where a forfeited database was replaced: what lasts is a database that lives.
        self._other_databases.warning(
            reply.incarnation,
            "client_id = %r: the holder answers another database (%.16s…) under this name, and refuses this one "
            "(%.16s…): its operations get no permits; give one of the two a client_id of its own, or, if the other is "
            "gone for ever, free what it holds with celery_durable.forfeit(account, %r, …)",
            core.client_id,
            reply.incarnation,
            core.incarnation,
            core.client_id,
        )

    def restored(self, connection: Connection) -> None:
        """Voids every permit, since the database was restored from a backup (section 8).

        The counter of reports jumps above everything that its lost life can have drawn: it has drawn fewer than
        1,000 a millisecond.
        """
        now_ms, _ = self._accounts.clock(connection)
        count = self._accounts.reset_all(connection)
        counters.raise_to(connection, self._tables.counters, REPORT_SEQ, now_ms * 1000)
        logger.warning("this database was restored from an earlier state: permits of %d accounts are void", count)

    def _core_settings(self, connection: Connection) -> QueueSettings:
        if self._core is None:
            client_id, incarnation = client_identity(connection, self._tables, self._settings.client_id)
            idle_return_ms = round(self._settings.idle_return_s * 1000)
            self._core = QueueSettings(client_id, incarnation, idle_return_ms=idle_return_ms)
        return self._core

    def _bring_up_to_date(
        self, connection: Connection, accounts: Sequence[str], replies: Mapping[str, AccountReply], *, one_by_one: bool
    ) -> _Batch:
        # Outside of the savepoints, whose rollback would unlock them: they must not be waited for again once the
        # counter is locked (see ``_sealed``).
        locked = self._accounts.lock(connection, accounts, wait=bool(replies))
        core = self._core_settings(connection)
        batch = _Batch()
        if locked and not one_by_one:
            self._pass(connection, locked, replies, core, batch, alone=True)
            return batch
        for account, state in locked.items():
            try:
                with connection.begin_nested():
                    self._pass(connection, {account: state}, replies, core, batch)
            except Exception as error:
                if is_no_accounts(error):
                    raise
                batch.failed[account] = error
        # The row of an account that fails stays as it was: absent, if it was made for this.
        self._accounts.delete(connection, [account for account in batch.failed if locked[account] is None])
        return batch

    def _pass(
        self,
        connection: Connection,
        locked: Mapping[str, str | None],
        replies: Mapping[str, AccountReply],
        core: QueueSettings,
        batch: _Batch,
        *,
        alone: bool = False,
    ) -> None:
        """Brings locked accounts up to date, and adds to ``batch`` what that did.

        :param alone: its transaction does nothing else, but for the offset of the replies.
        """
        states = {
            account: new_account(account) if state is None else AccountState.from_json(state)
            for account, state in locked.items()
        }
        facts = self._accounts.facts(connection, states)
        counts, now_ms = facts.counts, facts.now_ms
        plans = {
            account: plan(
                state,
                counts[account],
                replies.get(account),
                facts.declared.get(account),
                now_ms,
                core,
                seq_newest=facts.seq_newest,
            )
            for account, state in states.items()
        }
        restored = max((one.restored for one in plans.values() if one.restored is not None), default=None)
        if restored is not None:
            logger.warning(
                "a reply answers report %d, which this database never sent: it was restored from an earlier state, or "
                "a copy of it runs as client_id = %r too. What it was given is void. If there is a copy, end its "
                "dispatchers: until then neither keeps its permits",
                restored,
                core.client_id,
            )
            counters.raise_to(connection, self._tables.counters, REPORT_SEQ, restored)
        admitted, again = self._admit(connection, plans, counts, now_ms)
        outcomes = {
            account: finish(
                one,
                {group: len(rows) for group, rows in admitted.get(account, {}).items()},
                counts[account],
                now_ms,
                core,
            )
            for account, one in plans.items()
        }
        sealed = self._sealed(connection, outcomes, core)
        batch.staged += self._write(connection, sealed, replies, again, alone=alone)
        batch.admitted += [one for groups in admitted.values() for rows in groups.values() for one in rows]
        batch.done += len(locked)

    def _admit(
        self,
        connection: Connection,
        plans: Mapping[str, Plan],
        counts: Mapping[str, Mapping[str, GroupCounts]],
        now_ms: int,
    ) -> tuple[dict[str, dict[str, list[Admitted]]], dict[str, int]]:
        """Returns what was admitted, and when to look again at accounts where more could have been."""
        wanted: dict[tuple[str, str], int] = {}
        again: dict[str, int] = {}
        for account, one in plans.items():
            left = self._settings.pass_admit_max
            for group, count in one.admit.items():
                known = counts[account].get(group)
                could = min(count, known.waiting if known else 0)
                # More may wait than are counted: never all of them at once, or the next pass would not be asked for.
                wanted[account, group] = min(could, left, _DEFAULTS.waiting_count_max - 1)
                left -= wanted[account, group]
                if wanted[account, group] < could:
                    again[account] = now_ms
        found = self._admission.admit(connection, wanted)
        admitted: dict[str, dict[str, list[Admitted]]] = {}
        for (account, group), count in wanted.items():
            rows = found.get((account, group), [])
            admitted.setdefault(account, {})[group] = rows
            if len(rows) < count:
                again.setdefault(account, now_ms + LOCKED_ROWS_PAUSE_MS)
        return admitted, again

    def _sealed(self, connection: Connection, outcomes: dict[str, Outcome], core: QueueSettings) -> dict[str, Outcome]:
        """The outcomes with their new reports numbered: the counter's row is locked late, once for all of them."""
        unnumbered = [account for account, outcome in outcomes.items() if outcome.wants_seq]
        if not unnumbered:
            return outcomes
        drawn = counters.draw(connection, self._tables.counters, REPORT_SEQ, len(unnumbered))
        numbered = {account: seal(outcomes[account], seq, core) for account, seq in zip(unnumbered, drawn, strict=True)}
        return outcomes | numbered

    def _write(
        self,
        connection: Connection,
        outcomes: Mapping[str, Outcome],
        replies: Mapping[str, AccountReply],
        again: Mapping[str, int],
        *,
        alone: bool,
    ) -> int:
        """Returns how many reports it staged."""
        gone = [account for account, outcome in outcomes.items() if outcome.delete and account not in again]
        writes = [
            AccountWrite(
                state=outcome.state,
                blocked=outcome.blocked,
                due_at_ms=min((at for at in (outcome.due_at_ms, again.get(account)) if at is not None), default=None),
                reply=_applied(outcome, replies.get(account)),
            )
            for account, outcome in outcomes.items()
            if account not in gone
        ]
        topic = self._settings.accounts_topic
        staged = [
            outbox.Staged(topic, account, outcome.report.to_bytes(), REPORT_SLOT)
            for account, outcome in outcomes.items()
            if outcome.report is not None
        ]
        # Nobody outside has heard of such a pass before a worker's start is on the disk, and then the pass is too: if a
        # crash of the server takes it back, it was never made. Not so with a report, or a reply's offset.
        self._accounts.write(connection, writes, waits_for_disk=not alone or bool(staged or replies))
        self._accounts.delete(connection, gone)
        outbox.stage(connection, self._tables.outbox, staged)
        return len(staged)


def _age(reply: AccountReply) -> tuple[int, int, int]:
    return reply.epoch, reply.version, reply.answers


def _applied(outcome: Outcome, reply: AccountReply | None) -> str | None:
    return reply.model_dump_json() if reply is not None and outcome.ack == reply.ack else None
