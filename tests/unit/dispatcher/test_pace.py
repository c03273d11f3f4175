"""Passes rest where that lets the next one do more, and nowhere else."""

from __future__ import annotations

import pytest

from celery_durable.dispatcher.delivery import BREATH_S
from celery_durable.dispatcher.main import BUSY_MIN, REST, REST_MAX_S, _paced, rest_after_s


@pytest.mark.parametrize(
    ("took_s", "accounts", "under_way", "rest_s"),
    [
        (0.005, 1, 0, 0.0),  # one account that hands its permit from one operation to the next
        (0.005, 2, 0, REST * 0.005),
        (5.0, 2, 0, REST_MAX_S),
        (0.005, 1, BUSY_MIN, BREATH_S),
        (0.001, 2, BUSY_MIN, BREATH_S),
        (0.030, 2, BUSY_MIN, REST * 0.030),
    ],
)
def test_passes_of_several_accounts_and_those_of_busy_workers_rest(
    took_s: float, accounts: int, under_way: int, rest_s: float
) -> None:
    assert rest_after_s(took_s, accounts=accounts, under_way=under_way) == pytest.approx(rest_s)


def test_a_step_that_did_nothing_is_followed_by_no_rest() -> None:
    answers = iter([0.25, None, None, 0.5])
    rests = iter([0.0, 600.0])
    step = _paced(lambda: next(answers), lambda _: next(rests))
    assert step() == 0.25
    assert step() is None
    assert step() is None
    pause_s = step()
    assert pause_s is not None
    assert 0 < pause_s <= 600
    assert list(answers) == [0.5]
