"""The holder's decisions about one account, without I/O, clock or randomness (design, sections 8, 9 and 10).

The shell (``holder_service.service``) loads the account's state, calls :func:`decide` once per batch with the
account's messages in order and a version that it drew from the database's counter, writes the new state by
compare-and-set, and stages the replies, all in one transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from celery_durable.permits.messages import AccountReply, AccountReport, Command, LimitMirror


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits that the holder's configuration sets: by whole account, by name (the part before ``:``), or ``*``."""

    accounts: Mapping[str, int] = field(default_factory=dict)
    group_limits: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SemaphoreSettings:
    """Times of the holder's protocol, in ms, and sizes (sections 2, 8 and 9)."""

    claim_window_ms: int = 10_000
    claim_window_max_ms: int = 600_000
    turn_ms: int = 200
    fresh_ms: int = 5_000
    lease_extra_max: int = 16
    repeat_min_ms: int = 1_000
    repeat_max_ms: int = 30_000
    unclaimed_repeat_max_ms: int = 600_000
    reporting_lifetime_ms: int = 600_000
    forfeit_after_ms: int | None = None
    rules: Rules = field(default_factory=Rules)


@dataclass(frozen=True, slots=True)
class AccountState:
    """The holder's row of one account. The shell stores it as JSON and does not look inside."""

    account: str
    epoch: int
    version: int = 0

    def to_json(self) -> str:
        """The state as one JSON document."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, text: str) -> AccountState:
        """The state that :meth:`to_json` wrote."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Refusal:
    """A message that this account's holder refuses: it goes to the dead-letter topic with the reason."""

    message: AccountReport | Command
    reason: str


@dataclass(frozen=True, slots=True)
class ClientUsage:
    """One client in one account, for ``holder-service accounts``."""

    client_id: str
    in_use: int
    waiting: int
    footprint: int
    last_report_ms: int | None
    must_acknowledge: bool


@dataclass(frozen=True, slots=True)
class Usage:
    """One account as people see it."""

    account: str
    limit: int
    source: str
    paused: bool
    in_use: int
    waiting: int
    footprint: int
    clients: Sequence[ClientUsage] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """The account after a batch."""

    state: AccountState
    changed: bool = False
    """False: nothing to write, the version was not used."""
    replies: Sequence[AccountReply] = ()
    due_at_ms: int | None = None
    delete: bool = False
    """Nothing held and nothing waiting: the row goes."""
    refusals: Sequence[Refusal] = ()
    mirror: LimitMirror | None = None
    """The account's commands changed: the new mirror for the limits topic, and for the table of limits, which
    outlives the account's row."""
    warnings: Sequence[str] = ()


def new_account(account: str, epoch: int, mirror: LimitMirror | None = None) -> AccountState:
    """An account without a row, in the database's epoch, with the commands that are in force for it."""
    return AccountState(account, epoch)


def rebuilding_account(account: str, epoch: int, mirror: LimitMirror | None = None) -> AccountState:
    """An account that a holder without its database found in the topic.

    It gives nothing until every client seen there has acknowledged ``epoch``, or :func:`go` was called.
    """
    raise NotImplementedError


def new_epoch(state: AccountState, epoch: int) -> AccountState:
    """The account in a new epoch: what it gave counts until each client seen has acknowledged the epoch."""
    raise NotImplementedError


def go(state: AccountState) -> AccountState:
    """Stops waiting for clients that have not acknowledged the epoch (``holder-service go``)."""
    raise NotImplementedError


def decide(
    state: AccountState,
    messages: Sequence[AccountReport | Command],
    now_ms: int,
    version: int,
    settings: SemaphoreSettings,
) -> Decision:
    """Applies ``messages`` in order, runs the timers that are due, allocates once. Guarantees the bound."""
    raise NotImplementedError


def usage(state: AccountState, now_ms: int, settings: SemaphoreSettings) -> Usage:
    """What people see of the account."""
    raise NotImplementedError
