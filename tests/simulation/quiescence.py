"""The end of a run: all has run, nothing is counted, and no row of an idle account is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_durable.store.schema import ENDED_STATES
from tests.invariants import InvariantViolation
from tests.simulation.databases import holder_slot

if TYPE_CHECKING:
    from tests.simulation.checks import Checks


def waiting(checks: Checks) -> list[str]:
    """Operations that have not ended, of services that are there."""
    return [
        f"{service.name} {row.id} {row.state}"
        for service in checks.world.services
        if not service.gone and service.name in checks.views
        for row in checks.views[service.name].rows.values()
        if row.state not in ENDED_STATES
    ]


def check(checks: Checks) -> None:
    """At the end: all has run, nothing is counted, and no row of an idle account is left."""
    there = {(service.client_id, service.incarnation()) for service in checks.world.services if not service.gone}
    left = [
        f"{service.name} {table}"
        for service in checks.world.services
        if not service.gone
        for table in ("durable_accounts", "durable_outbox", "durable_wakes", "durable_untold")
        if service.slot.rows(f"SELECT 1 FROM {table} LIMIT 1")
    ]
    # A forfeited client is remembered until it speaks there again, which it may never have a reason to do.
    left += [
        f"holder {account} {name}"
        for account, state in checks.holder.states.items()
        for name, client in state.clients.items()
        if (name, client.incarnation) in there and not client.forfeited
    ]
    if holder_slot().rows("SELECT 1 FROM holder_outbox LIMIT 1"):
        left.append("holder_outbox")
    counted = sum(
        count
        for state in checks.holder.states.values()
        for (name, _), count in checks.holder.footprints(state).items()
        if (name, state.clients[name].incarnation) in there
    )
    still_waiting = waiting(checks)
    in_use = sum(
        count
        for pairs in checks.in_use(counted=False).values()
        for (name, _), count in pairs.items()
        if not checks.world.service(name).gone
    )
    if still_waiting:
        raise InvariantViolation(f"all ran: still waiting though faults have stopped: {still_waiting}; rows: {left}")
    for service in checks.world.services if checks.world.tells else ():
        for row in () if service.gone else checks.views[service.name].rows.values():
            checks.invariants.told(f"{service.name} {row.id}", row.state, service.told.get(row.id))
    checks.invariants.noticed(checks.holder.epoch, checks.holder.trusted_epoch)
    checks.invariants.quiet(counted, in_use, 0, left)


def holds(checks: Checks) -> bool:
    """Whether :func:`check` would find nothing. Cheap while operations wait."""
    if waiting(checks):
        return False
    try:
        check(checks)
    except InvariantViolation:
        return False
    return True
