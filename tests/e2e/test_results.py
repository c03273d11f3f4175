"""What ``delay`` and ``apply_async`` return, and what a known ID does, with real processes behind it."""

from __future__ import annotations

import pytest
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult
from sqlalchemy.orm import Session

import celery_durable
from celery_durable import DuplicateOperationError
from celery_durable.runtime import runtime_of
from tests.e2e.observe import History, operation, rows, wait_ended
from tests.harness import Service, Stack, wait_until

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def service(module_stack: Stack) -> Service:
    service = module_stack.service()
    module_stack.holder()
    service.dispatcher()
    service.worker()
    return service


def test_a_known_id_changes_nothing(service: Service) -> None:
    """Case A1: the same ID again returns the same handle, before, while and after it runs; another body raises."""
    account, flag = "tenant:known", service.folder / "known"
    until, arguments = service.task("until"), ("tenant:known", str(flag))
    first = until.apply_async(arguments, task_id="order-81")
    wait_until(lambda: operation(service, "order-81").state == "running", 60, what="it runs")
    second = until.apply_async(arguments, task_id="order-81")
    assert (first.duplicate, second.duplicate, first.id, first == second) == (False, True, "order-81", True)
    with pytest.raises(DuplicateOperationError, match="order-81"):
        until.apply_async((account, "another"), task_id="order-81")
    with pytest.raises(DuplicateOperationError, match="order-81"):
        service.task("work").apply_async((account,), task_id="order-81")
    flag.touch()
    assert second.get(timeout=60) == first.get(timeout=60) > 0
    third = until.apply_async(arguments, task_id="order-81")
    assert (third.duplicate, third.state, third.get(timeout=1)) == (True, "SUCCESS", first.get())
    service.task("work").delay(account)
    wait_ended(service, account, 2)
    assert History([service]).starts()["order-81"] == 1
    assert len(rows(service, "payloads", "id", id="order-81")) == 1


def test_a_result_before_its_commit(service: Service) -> None:
    """Case D2: an AsyncResult with the final ID at once, before the commit too; ``get`` and ``state`` work."""
    with Session(runtime_of(service.app).database.engine) as session:
        with celery_durable.using(session):
            result = service.task("add").delay(2, 3)
            assert isinstance(result, AsyncResult)
            assert result.state == "PENDING"
            assert not result.ready()
            with pytest.raises(RuntimeError, match="not committed yet"):
                result.get(timeout=5)
        assert not rows(service, "operations", "id", id=result.id)
        session.commit()
    assert result.get(timeout=60) == 5
    assert (result.state, result.successful()) == ("SUCCESS", True)
    assert service.app.AsyncResult(result.id, backend=result.backend).get(timeout=5) == 5
    failed = service.task("fail").delay("no such order")
    with pytest.raises(ValueError, match="no such order"):
        failed.get(timeout=60)
    assert failed.state == "FAILURE"


def test_a_revoked_result(service: Service) -> None:
    """Case D2: ``revoke`` ends what waits, before its commit too, and stops what runs."""
    account, flag = "tenant:revoked", service.folder / "revoked"
    running = [service.task("until").delay(account, str(flag)) for _ in range(2)]
    for result in running:
        wait_until(lambda result=result: result.state == "STARTED", 60, what="it runs")
    waiting = service.task("work").delay(account)
    assert waiting.state == "PENDING"
    waiting.revoke()
    with pytest.raises(TaskRevokedError):
        waiting.get(timeout=60)
    assert waiting.state == "REVOKED"
    with Session(runtime_of(service.app).database.engine) as session:
        with celery_durable.using(session):
            never = service.task("work").delay(account)
            never.revoke()
        session.commit()
    with pytest.raises(TaskRevokedError):
        never.get(timeout=60)
    running[0].revoke()
    with pytest.raises(TaskRevokedError):
        running[0].get(timeout=60)
    after = service.task("work").delay(account)
    assert after.get(timeout=60) == account  # the permit of the revoked one is free
    assert running[1].state == "STARTED"
    flag.touch()
    assert running[1].get(timeout=60) > 0
    assert not {waiting.id, never.id} & History([service]).starts(account).keys()
    History([service]).check_bound(2, account=account)
