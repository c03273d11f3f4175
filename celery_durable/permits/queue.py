"""The client's decisions about one account, without I/O, clock or randomness (design, sections 7 and 8).

The shell (``celery_durable.dispatcher.passes``) locks the account's row, reads the counts while it holds the lock,
and goes through three calls in one transaction:

1. :func:`plan` applies the reply at hand and says how many operations of each group may be admitted;
2. the shell admits up to that many rows and calls :func:`finish` with what it really admitted;
3. where the outcome ``wants_seq``, the shell draws one and calls :func:`seal`, then stages the report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from celery_durable.permits.messages import Ack, AccountReply, AccountReport, Declared, Reason


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Times of the client's protocol, in ms, and where each comes from (section 7)."""

    client_id: str
    incarnation: str
    idle_return_ms: int = 20_000
    report_repeat_min_ms: int = 1_000
    report_repeat_max_ms: int = 30_000
    waiting_repeat_max_ms: int = 600_000
    reporting_lifetime_ms: int = 600_000
    daily_report_ms: int = 86_400_000
    waiting_count_max: int = 1_000


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """What the rows say of one group, read while the account's lock is held. ``waiting`` is capped by the shell."""

    in_use: int = 0
    waiting: int = 0
    oldest_wait_ms: int = 0


@dataclass(frozen=True, slots=True)
class AccountState:
    """The client's row of one account. The shell stores it as JSON and does not look inside."""

    account: str

    def to_json(self) -> str:
        """The state as one JSON document."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, text: str) -> AccountState:
        """The state that :meth:`to_json` wrote."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Plan:
    """What :func:`plan` decided: at most ``admit[group]`` operations of each group may be admitted now."""

    state: AccountState
    admit: Mapping[str, int] = field(default_factory=dict)
    restored: int | None = None
    """A reply answers this ``seq``, above all that this database drew: it was restored. The shell moves its
    counter of ``seq`` past it before it draws one (section 8, "A client restored from a backup")."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The account after a pass."""

    state: AccountState
    wants_seq: bool = False
    report: AccountReport | None = None
    """The report to stage, replacing an unsent one. A repeat is here at once; a new one after :func:`seal`."""
    due_at_ms: int | None = None
    """When the account needs its next pass without a wake (repeat, idle return, end of a turn)."""
    delete: bool = False
    """Nothing waits, is in use or leased, and the last report is answered: the row goes."""
    blocked: Mapping[str, Reason] = field(default_factory=dict)
    """Why each group that still waits waits."""
    ack: Ack | None = None


def new_account(account: str) -> AccountState:
    """The state of an account that has no row: every group starts with permits 0 and keeps 0."""
    return AccountState(account)


def plan(
    state: AccountState,
    counts: Mapping[str, GroupCounts],
    reply: AccountReply | None,
    declared: Declared | None,
    now_ms: int,
    settings: QueueSettings,
    *,
    seq_newest: int | None = None,
) -> Plan:
    """Applies ``reply`` and ``declared`` and says what may be admitted. ``seq_newest``: the highest seq ever drawn."""
    raise NotImplementedError


def finish(
    plan: Plan,
    admitted: Mapping[str, int],
    counts: Mapping[str, GroupCounts],
    now_ms: int,
    settings: QueueSettings,
) -> Outcome:
    """Counts ``admitted`` as claims, gives back what is due, and decides about the report. ``counts`` as in plan()."""
    raise NotImplementedError


def seal(outcome: Outcome, seq: int, settings: QueueSettings) -> Outcome:
    """The outcome with its new report, numbered ``seq``, which must have been drawn while the lock was held."""
    raise NotImplementedError
