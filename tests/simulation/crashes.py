"""At which crash points the simulation crashes, and why it passes none of the others."""

from __future__ import annotations

from celery_durable.crashpoints import POINTS

ELSEWHERE: dict[str, str] = {
    "migrate.upgrade": "a run begins with migrated databases",
    "telling.claim": "a run's calls have neither an own result backend nor errbacks, so nobody is to be told",
    "telling.told": "as telling.claim",
    "worker.revoke": "Celery's revoke is a real worker's; a run's workers are its statements only",
    "worker.lose": "it is of a worker whose pool child died; a run's workers die as a whole",
    "worker.told": "as telling.claim",
    "worker.outcome": "as telling.claim",
    "worker.message": "a run's broker has no acknowledgement; it delivers again what a dead worker had",
    "events.message": "Celery's events carry nothing that anything depends on; a run sends none",
    "rebuild.alive": "a rebuild of a run ends within one step, long before it is due to say that it lives",
    "rebuild.give_up": "it is of a holder that is told to stop in the midst of a rebuild; a run's are killed",
    "go.accounts": "operators of a run forfeit a service that is gone, and say `go` only for a lost topic",
}
"""Places that no process of a run passes, with the reason. Real processes are killed at them (``tests/crashing/``)."""

_RARE_PLACES = (
    "results.cancel",
    "results.forget",
    "replies.restored",
    "delivery.put_back",
    "worker.fail",
    "worker.cancel",
    "worker.repeat",
    "holder.adopt",
    "life.new_epoch",
    "rebuild.take",
    "rebuild.limits",
    "rebuild.sweep",
    "rebuild.replay",
    "rebuild.finish",
    "go.begin",
)


def place_of(point: str) -> str:
    """The place of a crash point, without its moment."""
    return point.rpartition(".")[0]


REACHED = tuple(point for point in POINTS if place_of(point) not in ELSEWHERE)
"""Where the simulation crashes."""
RARE = tuple(point for point in REACHED if place_of(point) in _RARE_PLACES)
"""Those that few seeds pass: a crash is made ready at many of them at once, before the seed begins."""
_CHANCES = {
    "results.forget.before_commit": 0.4,
    "results.forget.after_commit": 0.6,
    "replies.restored": 0.9,
    "worker.cancel.before_commit": 0.5,
    "worker.cancel.after_commit": 0.9,
    "holder.adopt": 0.6,
    "life.new_epoch": 0.6,
    "rebuild.take": 0.15,
    "rebuild.limits": 0.9,
    "rebuild.sweep": 0.6,
    "rebuild.replay": 0.15,
    "rebuild.finish": 0.15,
}
CHANCES = {point: _CHANCES.get(point, _CHANCES.get(place_of(point), 0.3)) for point in RARE}
"""That a crash is made ready at one of these: by point, by place, or 0.3."""
USUAL = tuple(point for point in REACHED if point not in RARE)

SEEDS_FOR_ALL = 1_000
"""So many seeds crash at each of :data:`REACHED`, and meet each kind of fault."""


def missed(crashed: set[str]) -> list[str]:
    """Where the simulation never crashed, though it should."""
    return [point for point in REACHED if point not in crashed]
