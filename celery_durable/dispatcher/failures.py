"""Accounts whose pass fails: each fails alone, and rests for a growing while (case F5)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

from celery_durable.store.offsets import OffsetMoved

logger = logging.getLogger(__name__)

T = TypeVar("T")

PAUSE_MIN_S = 1.0
PAUSE_MAX_S = 60.0


def is_no_accounts(error: Exception) -> bool:
    """Whether it says nothing of any account: the connection was lost, a lock timed out, the disk is full, …"""
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    return isinstance(error, OperationalError | InterfaceError | OffsetMoved)


def together_or_one_by_one(do: Callable[[bool], T]) -> T:
    """``do(False)``: a transaction for all accounts; where that fails, ``do(True)``: the same, account by account.

    Savepoints, which a failing account needs so that it fails alone (case F5), cost two trips: hardly any needs them.
    What the database itself fails, or another consumer's move of the offset, is raised.
    """
    try:
        return do(False)
    except Exception as error:
        if is_no_accounts(error):
            raise
        logger.info("accounts are done one by one, since one of them fails: %s: %s", type(error).__name__, error)
        return do(True)


@dataclass(slots=True)
class _Failure:
    again_at: float
    pause_s: float


class Failures:
    """The accounts whose last pass failed, in this process. For one thread."""

    def __init__(self) -> None:
        self._failures: dict[str, _Failure] = {}

    @property
    def resting(self) -> int:
        """How many are not to be tried yet."""
        return len(self._failures) - len(self.ready(self._failures))

    def ready(self, accounts: Collection[str]) -> list[str]:
        """Those of the accounts that may be tried now."""
        now = time.monotonic()
        return [one for one in accounts if one not in self._failures or self._failures[one].again_at <= now]

    def pauses_s(self) -> list[float]:
        """How long each still rests."""
        now = time.monotonic()
        return [max(0.0, failure.again_at - now) for failure in self._failures.values()]

    def forget_all_but(self, chosen: Collection[str]) -> None:
        """Forgets those whose time has come and that need no pass any more."""
        for account in self.ready(self._failures):
            if account not in chosen:
                del self._failures[account]

    def note(self, tried: Collection[str], failed: Mapping[str, Exception]) -> None:
        """Has those that failed rest, twice as long as the last time, and says so."""
        for account in tried:
            error = failed.get(account)
            if error is None:
                self._failures.pop(account, None)
                continue
            before = self._failures.get(account)
            pause_s = min(PAUSE_MAX_S, before.pause_s * 2) if before else PAUSE_MIN_S
            self._failures[account] = _Failure(time.monotonic() + pause_s, pause_s)
            logger.error(
                "account %r: its pass failed: %s: %s; again in %.0f s", account, type(error).__name__, error, pause_s
            )
