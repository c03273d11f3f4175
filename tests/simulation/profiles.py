"""Seeds that concentrate on one situation, which the general mix of faults makes too rarely to rely on.

One seed in thirty for each, or two. A profile narrows what a seed is like and which faults it has; all else is drawn as
ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.simulation.holders import holder_settings

if TYPE_CHECKING:
    from tests.simulation.shells import World

EVERY = 30
"""Of so many seeds, one has a certain profile."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One situation."""

    name: str
    draw: Callable[[World], None]
    """Narrows what was drawn."""
    faults: tuple[str, ...] = ()
    """The kinds of faults, in place of those that a seed draws."""
    weather: Mapping[str, Any] | None = None
    """What goes wrong with messages, in place of what a seed draws; None: as drawn."""
    at_once: bool = False
    """All is enqueued as the run begins."""
    ceilings: bool = False
    """What the holder gives is one-shot: it comes with a ceiling of claims."""
    crashes_at: tuple[str, ...] = ()
    """Crash points that other seeds pass too rarely: the first process that passes the drawn one dies there."""
    settles_at: tuple[int, int] = (1, 3)
    """The limits, from and to, that an account is given when faults stop."""
    settle_ms: int | None = None
    """How long after faults stopped all must have run; None: as long as any seed may take."""


def of(seed: int) -> Profile | None:
    """The profile of this seed, if it has one."""
    return _PROFILES.get(seed % EVERY)


def _contend(world: World, services: int, work: int) -> None:
    world.accounts, world.groups = world.accounts[:1], [""]
    world.service_count, world.work_left = services, work


def _late_replies(world: World) -> None:
    """Leases come and go, and what gave them arrives long afterwards."""
    _contend(world, world.rng.choice((2, 3)), 20)
    world.declared = {"limit": world.rng.choice((1, 2))}
    world.durations, world.idle_return_s = (5, 300), world.rng.choice((0.2, 0.6))


def _silence(world: World) -> None:
    """A service reports too rarely for the holder, and has something in use."""
    _contend(world, 2, 10)
    world.declared = {"limit": world.rng.choice((1, 2))}
    world.durations = (2_000, 20_000)
    world.holder_settings = holder_settings(10.0)
    world.semaphore_settings = world.holder_settings.semaphore()


def _two_holders(world: World) -> None:
    """Holders that do not know of each other run the same timers; messages, which would tell them, are rare."""
    _contend(world, 3, 16)
    world.accounts = [*world.accounts, "tenant:bolt"]
    world.holder_count, world.declared = 3, {"limit": 1}
    world.durations = (2_000, 9_000)
    world.faults_end_ms += 40_000


def _groups(world: World) -> None:
    """Groups that reach their own limit long before the account's."""
    world.groups = ["", "wf-1"]
    world.declared, world.durations, world.work_left = {"limit": 5, "group_limit": 1}, (20, 1_500), 16


def _back_in_time(world: World) -> None:
    """The holder's database is lost, or an older copy, while much is in use."""
    _contend(world, 2, 16)
    world.durations = (500, 9_000)


def _doubts(world: World) -> None:
    """Commits fail, or say that they did; workers freeze in mid-attempt."""
    _contend(world, 2, 20)
    world.durations = (20, 9_000)


def _frozen(world: World) -> None:
    """Workers that wake when their operation has gone on to another, and is still running there."""
    _contend(world, 1, 12)
    world.declared, world.durations = {"limit": 3}, (3_000, 15_000)
    world.faults_end_ms += 40_000


def _under_leases(world: World) -> None:
    """The holder's database is lost while services claim under leases, with no message: only they know what is used."""
    _contend(world, 2, 24)
    world.declared, world.durations = {"limit": world.rng.choice((3, 4, 5))}, (500, 6_000)


def _contended(world: World) -> None:
    """Three services with much to do each, for one permit: whoever the holder passes over is seen, under faults too."""
    _contend(world, 3, 27)
    world.declared, world.durations = {"limit": 1}, (100, 400)


def _left_behind(world: World) -> None:
    """A service is gone for ever while it waits for much, and has nothing: it reported too long ago for a lease."""
    _contend(world, 2, 30)
    world.declared, world.durations = {"limit": 1}, (5_500, 8_000)


def _ceilings(world: World) -> None:
    """Permits that are good for one claim each."""
    _contend(world, world.rng.choice((1, 2, 3)), 14)


_SITUATIONS = {
    1: Profile("groups", _groups, faults=("cancel", "kill")),
    3: Profile("two holders", _two_holders, faults=("two owners",), weather={"slow": 0.95, "slow_ms": 20_000}),
    6: Profile(
        "late replies",
        _late_replies,
        faults=("cancel", "freeze"),
        weather={"slow": 0.5, "slow_ms": 3_000, "loss": 0.1, "double": 0.1},
    ),
    7: Profile(
        "back in time", _back_in_time, faults=("crash", "holder's database goes back", "holder's database lost")
    ),
    8: Profile("doubts", _doubts, faults=("commit in doubt", "commit refused", "crash", "freeze")),
    9: Profile("contended", _contended, faults=("freeze", "kill"), at_once=True),
    11: Profile(
        "silence",
        _silence,
        faults=("cancel", "freeze"),
        crashes_at=("worker.cancel.before_commit", *("worker.cancel.after_commit",) * 2),
    ),
    12: Profile(
        "left behind",
        _left_behind,
        faults=("client gone",),
        weather={},
        at_once=True,
        settles_at=(1, 1),
        settle_ms=300_000,
    ),
    19: Profile(
        "under leases", _under_leases, faults=("holder's database lost",), weather={"slow": 0.5, "slow_ms": 3_000}
    ),
    17: Profile("frozen", _frozen, faults=("freeze",), weather={}),
    14: Profile("ceilings", _ceilings, ceilings=True, faults=("cancel", "crash", "freeze", "limit")),
}
_PROFILES = {**_SITUATIONS, 13: _SITUATIONS[3], 22: _SITUATIONS[7], 23: _SITUATIONS[8]}
"""Three of them find faults that few of their seeds meet: they have two seeds in thirty."""
