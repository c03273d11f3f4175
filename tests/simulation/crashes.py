"""The crash points as the simulation crashes at them: at each."""

from __future__ import annotations

from celery_durable.crashpoints import POINTS

_RARE_PLACES = (
    "results.cancel",
    "results.forget",
    "results.purge",
    "replies.restored",
    "delivery.put_back",
    "worker.fail",
    "worker.cancel",
    "worker.repeat",
    "migrate.upgrade",
    "events.message",
    "telling.claim",
    "telling.told",
    "worker.told",
    "worker.outcome",
    "worker.lose",
    "worker.revoke",
    "holder.adopt",
    "life.new_epoch",
    "rebuild.take",
    "rebuild.limits",
    "rebuild.sweep",
    "rebuild.replay",
    "rebuild.finish",
    "rebuild.alive",
    "rebuild.give_up",
    "go.begin",
    "go.accounts",
)


def place_of(point: str) -> str:
    """The place of a crash point, without its moment."""
    return point.rpartition(".")[0]


RARE = tuple(point for point in POINTS if place_of(point) in _RARE_PLACES)
"""Those that few seeds pass: a crash is made ready at many of them at once, before the seed begins."""
_CHANCES = {
    "results.forget.before_commit": 0.4,
    "results.forget.after_commit": 0.6,
    "results.purge": 0.9,
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
    "rebuild.alive.before_commit": 0.65,
    "rebuild.alive.after_commit": 0.95,
    "rebuild.give_up": 0.6,
    "go.accounts": 0.7,
}
CHANCES = {point: _CHANCES.get(point, _CHANCES.get(place_of(point), 0.3)) for point in RARE}
"""That a crash is made ready at one of these: by point, by place, or 0.3."""
USUAL = tuple(point for point in POINTS if point not in RARE)

SEEDS_FOR_ALL = 1_000
"""So many seeds crash at each of them, and meet each kind of fault."""


def missed(crashed: set[str]) -> list[str]:
    """Where the simulation never crashed."""
    return [point for point in POINTS if point not in crashed]
