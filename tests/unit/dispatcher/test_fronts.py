"""What is sent to Celery again, and what is left in its queue to wait its turn (case C4)."""

from __future__ import annotations

import pytest

from celery_durable.dispatcher.fronts import ALL_MS, TOGETHER_MS, Fronts

Q = "celery"
PATIENCE_S = 2.0


@pytest.fixture
def fronts() -> Fronts:
    return Fronts(PATIENCE_S)


def test_what_nobody_has_watched_is_sent_again_at_once(fronts: Fronts) -> None:
    """A dispatcher that starts knows nothing of the queue."""
    fronts.look({Q: 1_000}, 0.0)
    assert fronts.lost_until_ms(Q, 0.0) == ALL_MS


def test_a_queue_that_moves_is_left_alone_however_long_it_is(fronts: Fronts) -> None:
    for step in range(100):
        fronts.look({Q: 1_000 + 10 * step}, step)
    assert fronts.lost_until_ms(Q, 99.0) is None
    assert fronts.lost_until_ms(Q, 99.0 + PATIENCE_S - 0.1) is None


def test_a_front_that_stands_is_sent_again_alone_then_all(fronts: Fronts) -> None:
    """One lost message among many that wait must not have all of them sent again; a broker that was wiped must."""
    fronts.look({Q: 1_000}, 0.0)
    fronts.look({Q: 2_000}, 1.0)
    fronts.look({Q: 2_000}, 4.0)
    assert fronts.lost_until_ms(Q, 4.0) == 2_000 + TOGETHER_MS
    fronts.sent_again(Q, 4.0, is_all=True)
    fronts.look({Q: 2_500}, 4.1)
    assert fronts.lost_until_ms(Q, 4.1) is None, "that another one is the front now is no move"
    assert fronts.lost_until_ms(Q, 4.0 + PATIENCE_S) == ALL_MS


def test_one_that_moves_after_its_front_was_sent_again_is_left_alone(fronts: Fronts) -> None:
    fronts.look({Q: 1_000}, 0.0)
    fronts.look({Q: 2_000}, 1.0)
    fronts.sent_again(Q, 4.0, is_all=True)
    fronts.look({Q: 2_500}, 4.1)
    fronts.look({Q: 2_600}, 4.2)
    assert fronts.lost_until_ms(Q, 5.0) is None
    assert fronts.lost_until_ms(Q, 4.2 + PATIENCE_S) == 2_600 + TOGETHER_MS


def test_a_front_that_goes_back_is_another_one(fronts: Fronts) -> None:
    """Something was made due earlier: a dispatcher that did not get to send it put it back."""
    fronts.look({Q: 1_000}, 0.0)
    fronts.look({Q: 2_000}, 1.0)
    fronts.look({Q: 500}, 1.1)
    assert fronts.lost_until_ms(Q, 1.1) == ALL_MS


def test_queues_are_judged_each_alone(fronts: Fronts) -> None:
    fronts.look({Q: 1_000, "other": 1_000}, 0.0)
    fronts.look({Q: 2_000, "other": 1_000}, 1.0)
    assert fronts.lost_until_ms(Q, 1.0) is None
    assert fronts.lost_until_ms("other", 1.0) == ALL_MS
    assert fronts.lost_until_ms("none", 1.0) is None


def test_a_queue_that_was_empty_is_forgotten(fronts: Fronts) -> None:
    fronts.look({Q: 1_000}, 0.0)
    fronts.sent_again(Q, 0.0, is_all=True)
    fronts.look({}, 1.0)
    fronts.look({Q: 5_000}, 1.1)
    assert fronts.lost_until_ms(Q, 1.1) == ALL_MS


def test_a_broker_that_lost_more_than_a_batch_is_sent_it_batch_after_batch(fronts: Fronts) -> None:
    fronts.look({Q: 1_000}, 0.0)
    for step in range(1, 6):
        assert fronts.lost_until_ms(Q, step / 10) == ALL_MS
        fronts.sent_again(Q, step / 10, is_all=False)
        fronts.look({Q: 1_000 + step}, step / 10)
    fronts.sent_again(Q, 0.6, is_all=True)
    fronts.look({Q: 9_000}, 0.6)
    assert fronts.lost_until_ms(Q, 0.6) is None


def test_more_was_sent_with_the_front_than_a_batch_takes(fronts: Fronts) -> None:
    """It is no reason yet to send all."""
    fronts.look({Q: 1_000}, 0.0)
    fronts.look({Q: 2_000}, 1.0)
    assert fronts.lost_until_ms(Q, 4.0) == 2_000 + TOGETHER_MS
    fronts.sent_again(Q, 4.0, is_all=False)
    fronts.look({Q: 2_050}, 4.1)
    assert fronts.lost_until_ms(Q, 4.1) is None
