"""How far the jobs are, read from both services' databases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import func, select

from celery_durable.runtime import runtime_of
from celery_durable.store.schema import ENDED_STATES, PERMIT_STATES, SUCCEEDED, WAITING_STATES


@dataclass(slots=True)
class TenantProgress:
    """Counts of one tenant's, or one workflow's, operations in both services."""

    done: int = 0
    waiting: int = 0
    in_use: int = 0
    """Operations that hold a permit."""
    retried: int = 0
    """Attempts that failed or were lost and were made again."""


@dataclass(slots=True)
class Progress:
    """All counts at one moment."""

    tenants: dict[tuple[str, str | None], TenantProgress] = field(default_factory=dict)
    states: Counter[str] = field(default_factory=Counter)

    def of(self, tenant: str, workflow: str | None = None) -> TenantProgress:
        """The counts of the tenant, or of one workflow of it."""
        return self.tenants.setdefault((tenant, workflow), TenantProgress())

    @property
    def ended(self) -> int:
        """Operations that have ended, in whatever way."""
        return sum(self.states[state] for state in ENDED_STATES)

    @property
    def in_use(self) -> int:
        """Operations that hold a permit."""
        return sum(self.states[state] for state in PERMIT_STATES)


def read(apps: Mapping[str, Any]) -> Progress:
    """The counts now."""
    progress = Progress()
    for app in apps.values():
        runtime = runtime_of(app)
        operations, attempts = runtime.tables.operations, runtime.tables.attempts
        place = (operations.c.account, operations.c.group)
        states = select(*place, operations.c.state, func.count()).group_by(*place, operations.c.state)
        retried = (
            select(*place, func.count())
            .join_from(operations, attempts, attempts.c.operation_id == operations.c.id)
            .group_by(*place)
        )
        with runtime.database.reading() as connection:
            for account, group, state, count in connection.execute(states):
                progress.states[state] += count
                for counts in _places(progress, account, group):
                    counts.done += count if state == SUCCEEDED else 0
                    counts.waiting += count if state in WAITING_STATES else 0
                    counts.in_use += count if state in PERMIT_STATES else 0
            for account, group, count in connection.execute(retried):
                for counts in _places(progress, account, group):
                    counts.retried += count
    return progress


def _places(progress: Progress, account: str, group: str) -> list[TenantProgress]:
    tenant = account.removeprefix("tenant:")
    return [progress.of(tenant), progress.of(tenant, group)] if group else [progress.of(tenant)]


def states_of(apps: Mapping[str, Any]) -> dict[str, str]:
    """Every operation's state, by its ID."""
    found: dict[str, str] = {}
    for app in apps.values():
        runtime = runtime_of(app)
        operations = runtime.tables.operations
        with runtime.database.reading() as connection:
            found.update((row.id, row.state) for row in connection.execute(select(operations.c.id, operations.c.state)))
    return found


def lost_tokens(apps: Mapping[str, Any]) -> Sequence[str]:
    """The run tokens of the attempts whose worker was lost."""
    found: list[str] = []
    for app in apps.values():
        runtime = runtime_of(app)
        attempts = runtime.tables.attempts
        with runtime.database.reading() as connection:
            found += connection.scalars(select(attempts.c.run_token).where(attempts.c.outcome == "lost"))
    return found
