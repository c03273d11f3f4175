"""What becomes of an operation whose attempt was lost with its worker: one decision, whoever noticed the loss."""

from __future__ import annotations

from typing import Any

import pytest

from celery_durable.store.losses import LostAttempt, decide


def lost(**fields: Any) -> LostAttempt:
    values: dict[str, Any] = {"order_no": 1, "id": "op", "generation": 1, "attempt": 2, "account": "acme"}
    values |= {"worker": "w@h", "run_token": "t", "started_at": 5, "overdue_ms": 0, "worker_losses": 0}
    return LostAttempt(**{**values, "cancel_requested": False, "policy": {}, **fields})


@pytest.mark.parametrize(
    ("before", "own", "setting", "state"),
    [
        (0, None, 3, "retrying"),
        (2, None, 3, "retrying"),
        (3, None, 3, "failed"),
        (0, None, 0, "failed"),
        (0, 0, 3, "failed"),
        (4, 5, 3, "retrying"),
        (5, 5, 9, "failed"),
        (0, 1.0, 0, "retrying"),
    ],
)
def test_losses_are_capped_by_the_task_or_else_by_the_setting(
    before: int, own: float | None, setting: int, state: str
) -> None:
    """C1, C11: ``max_worker_losses`` is how many are tolerated."""
    policy = {"max_worker_losses": own, "limit": None}
    loss = decide(lost(worker_losses=before, policy=policy), "killed", losses_max=setting)
    assert loss.state == state
    assert loss.text.startswith("attempt 2 was lost on w@h: killed")
    assert ("max_worker_losses" in loss.text) == (state == "failed")


def test_a_cancel_request_wins() -> None:
    """A25: it neither runs again nor fails."""
    for before in (0, 3):
        loss = decide(lost(worker_losses=before, cancel_requested=True), "killed", losses_max=3)
        assert loss.state == "cancelled"
        assert loss.text.endswith("it had been asked to stop")


def test_a_worker_that_is_not_known_is_named_so() -> None:
    assert "an unknown worker" in decide(lost(worker=None), "killed", losses_max=3).text
