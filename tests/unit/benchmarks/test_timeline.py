"""A hand-over's steps are found among what all processes noted."""

from __future__ import annotations

from benchmarks.timeline import FROM, FROM_WORKER, HOLDER, PATH, TO, TO_WORKER, Passing, steps_ms

PIDS = {FROM: 1, TO: 2, HOLDER: 3, FROM_WORKER: 14, TO_WORKER: 15}
LABELS = {1: FROM, 2: TO, 3: HOLDER}


def passings() -> list[Passing]:
    """Each step a ms longer than the one before it."""
    at_ms, found = 0, []
    for number, (who, point, _) in enumerate(PATH):
        at_ms += number
        found.append(Passing(1_000_000 * (1 + at_ms), PIDS[who], point))
    return found


def test_each_step_takes_from_the_one_before_to_its_own_point() -> None:
    assert steps_ms(passings(), LABELS) == [float(number) for number in range(1, len(PATH))]


def test_what_others_pass_meanwhile_counts_for_nothing() -> None:
    other = [Passing(one.time_ns - 1, PIDS[TO if one.pid == PIDS[FROM] else FROM], one.point) for one in passings()]
    mixed = sorted([*passings(), *(one for one in other if one.pid in LABELS)], key=lambda one: one.time_ns)
    assert steps_ms(mixed, LABELS) == steps_ms(passings(), LABELS)


def test_a_round_that_lacks_a_step_is_none() -> None:
    assert steps_ms(passings()[:-1], LABELS) is None
