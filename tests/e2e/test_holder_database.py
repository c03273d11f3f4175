"""The holder's database is lost twice, or is an older copy of itself, while two services work (case A18)."""

from __future__ import annotations

import re
from typing import Any

import pytest

from holder_service import store
from tests.e2e.observe import History, in_use, operation, states, wait_ended
from tests.harness import Process, Service, Stack, wait_until
from tests.integration.holder_rig import Rig

pytestmark = [pytest.mark.processes, pytest.mark.postgresql, pytest.mark.kafka, pytest.mark.timeout(400)]

SESSION_MS = 1_500
DEADLINE_S = 90.0
ACCOUNT = "tenant:acme"


def epochs(holder: Process) -> list[int]:
    """The epochs in which the holder came into service, by its log."""
    return [int(found) for found in re.findall(r"in service: epoch (\d+)", holder.log.read_text())]


def later_epoch(holder: Process, than: int) -> int:
    """Waits until the holder has come into service in a later epoch, which is returned."""
    return wait_until(
        lambda: next((epoch for epoch in epochs(holder) if epoch > than), None), DEADLINE_S, what=f"epoch above {than}"
    )


def running(service: Service, count: int) -> list[Any]:
    """So many operations of the account run until there is a file ``go``."""
    results = [service.task("until").delay(ACCOUNT, str(service.folder / "go")) for _ in range(count)]
    for result in results:
        wait_until(lambda result=result: operation(service, result.id).state == "running", DEADLINE_S, what="it runs")  # type: ignore[misc]
    return results


@pytest.mark.parametrize("fate", ["lost twice", "older copy"])
def test_the_limit_holds_while_the_holders_database_is_rebuilt(real_stack: Stack, fate: str) -> None:
    """Case A18: lost twice before anybody acknowledged; or restored, as by a failover to a replica that lags."""
    env = real_stack.holder_env(kafka_session_timeout_ms=SESSION_MS)
    rig = Rig(env["HOLDER_DATABASE_URL"], real_stack.kafka, group_id=env["HOLDER_GROUP_ID"], makes_topics=False)
    services = [real_stack.service("billing", idle_return_s=300.0), real_stack.service("crm")]
    billing, crm = services
    holder = real_stack.holder(kafka_session_timeout_ms=SESSION_MS)
    dispatchers = [service.dispatcher() for service in services]
    for service in services:
        service.worker()
        service.task("work").delay(f"first:{service.name}")
        wait_ended(service, f"first:{service.name}", 1, DEADLINE_S)
    copy = rig.snapshot()
    held = running(billing, 2)
    waiting = [crm.task("work").delay(ACCOUNT) for _ in range(4)]
    wait_until(lambda: (usage := rig.usage(ACCOUNT)) and usage.waiting > 0, DEADLINE_S, what="crm is known to wait")

    epoch = epochs(holder)[-1]
    for dispatcher in dispatchers:
        dispatcher.freeze()
    for _ in range(2 if fate == "lost twice" else 1):
        holder.kill()
        rig.restore({} if fate == "lost twice" else copy)
        holder = real_stack.holder(kafka_session_timeout_ms=SESSION_MS)
        epoch = later_epoch(holder, epoch)
    with rig.database.reading() as connection:
        state = store.load_rows(connection, rig.tables, [ACCOUNT])[ACCOUNT].state
    assert state.waits_for_epoch
    for dispatcher in dispatchers:
        dispatcher.thaw()
    # Work that needs no new permit goes on, and both acknowledge; then the account moves again.
    fresh = crm.task("work").delay("tenant:fresh")
    assert fresh.get(timeout=DEADLINE_S) == "tenant:fresh"
    assert states(crm, ACCOUNT) == {"queued": 4}
    (billing.folder / "go").touch()
    assert all(result.get(timeout=DEADLINE_S) for result in held)
    assert [result.get(timeout=DEADLINE_S) for result in waiting] == [ACCOUNT] * 4
    history = History(services)
    history.check_bound(2)
    assert set(history.starts().values()) == {1}
    wait_until(lambda: not any(in_use(service) for service in services), DEADLINE_S, what="nothing in use")
    rig.close()
