"""A loop's rest after work."""

from __future__ import annotations

from celery_durable.dispatcher.main import _paced


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
