"""Every crash point that production code has is one where a real process was killed."""

from __future__ import annotations

from celery_durable.crashpoints import POINTS
from tests.crashing import test_commands, test_dispatcher, test_holder, test_worker


def test_every_point_is_crashed_at() -> None:
    """The tests beside this one crash at all of ``POINTS``, and the code has no others (``test_crashpoints.py``)."""
    crashed = {
        *test_worker.CRASHED,
        *test_dispatcher.CRASHED,
        *test_holder.CRASHED,
        *test_commands.CRASHED,
        *test_commands.CRASHED_BY_MIGRATION,
    }
    assert crashed == set(POINTS)
