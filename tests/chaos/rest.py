"""What SQL and the holder say at the end of a chaos run."""

from __future__ import annotations

import json
from collections import Counter

from sqlalchemy import select

from celery_durable.runtime import runtime_of
from celery_durable.store.schema import ENDED_STATES, WAITING_STATES
from tests.chaos.history import Final, FinalOperation
from tests.chaos.system import System
from tests.e2e.observe import holder_rows, holder_usage, in_use, outbox_depth, rows, states
from tests.harness import Service

_EMPTY_AT_REST = ("outbox", "wakes", "accounts")


def at_rest(system: System) -> bool:
    """Whether every operation has ended, and neither side has a message or a row of an account left."""
    return not unfinished(system) and not _left(system)


def unfinished(system: System) -> list[str]:
    """The operations that have not ended."""
    return sorted(name for service in system.services.values() for name in _unfinished(service))


def outboxes(system: System) -> dict[str, int]:
    """How many messages wait for Kafka in each service's outbox, and in the holder's."""
    found = {f"outbox of {service.name}": outbox_depth(service) for service in system.services.values()}
    return {**found, "outbox of the holder": len(holder_rows(system.stack, "outbox", "no"))}


def final(system: System) -> Final:
    """The end, as the checker wants it."""
    services = list(system.services.values())
    counts: Counter[str] = sum((states(service) for service in services), Counter())
    return Final(
        operations={name: row for service in services for name, row in _operations(service).items()},
        states=dict(counts),
        in_use=sum(in_use(service) for service in services),
        waiting=sum(counts[state] for state in WAITING_STATES),
        footprint=sum(usage["footprint"] for usage in holder_usage(system.stack).values()),
        left=_left(system),
    )


def _operations(service: Service) -> dict[str, FinalOperation]:
    found = rows(service, "operations", "id", "state", "attempt", "result")
    return {
        name: FinalOperation(service.name, state, attempt, _token(state, result))
        for name, state, attempt, result in found
    }


def _token(state: str, result: bytes | None) -> str | None:
    return str(json.loads(result)) if state == "succeeded" and result is not None else None


def _unfinished(service: Service) -> list[str]:
    runtime = runtime_of(service.app)
    operations = runtime.tables.operations
    statement = select(operations.c.id).where(operations.c.state.not_in(ENDED_STATES))
    with runtime.database.reading() as connection:
        return list(connection.scalars(statement))


def _left(system: System) -> list[str]:
    left = []
    for service in system.services.values():
        for table in _EMPTY_AT_REST:
            column = "no" if table != "accounts" else "account"
            if found := rows(service, table, column):
                left.append(f"{table} of {service.name}: {len(found)}")
    for table in ("outbox", "accounts"):
        column = "no" if table == "outbox" else "account"
        if found := holder_rows(system.stack, table, column):
            left.append(f"{table} of the holder: {len(found)}")
    return left
