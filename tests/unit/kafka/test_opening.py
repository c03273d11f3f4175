"""Where a partition is begun, and whether the database went back, by what SQL, the topic and the group say."""

from __future__ import annotations

import pytest

from celery_durable.kafka.opening import Opening, Witness, open_partition
from celery_durable.store.offsets import Position

NOW, OLD, OLDER = "the topic", "an earlier topic", "a topic before that"
LOW, HIGH = 10, 100


def found(stored: tuple[str, int] | None, committed: tuple[str, int] | None) -> Opening:
    position = None if stored is None else Position("accounts", 0, *stored)
    witness = None if committed is None else Witness(committed[1], committed[0])
    return open_partition(0, NOW, LOW, HIGH, position, witness)


@pytest.mark.parametrize(
    ("stored", "start", "recreated", "trimmed"),
    [
        (None, LOW, False, False),
        ((NOW, LOW), LOW, False, False),
        ((NOW, 50), 50, False, False),
        ((NOW, HIGH), HIGH, False, False),
        ((NOW, LOW - 1), LOW, False, True),
        ((NOW, HIGH + 1), LOW, True, False),
        ((OLD, 50), LOW, True, False),
        ((OLD, 5), LOW, True, False),
    ],
)
def test_start(stored: tuple[str, int] | None, start: int, recreated: bool, trimmed: bool) -> None:
    """B8."""
    opening = found(stored, None)
    assert (opening.start, opening.recreated, opening.trimmed) == (start, recreated, trimmed)
    assert not opening.went_back


@pytest.mark.parametrize(
    ("stored", "committed", "went_back"),
    [
        (None, None, False),
        (None, (NOW, 1), True),
        (None, (OLD, 1), True),
        ((NOW, 50), None, False),
        ((NOW, 50), (NOW, 49), False),
        ((NOW, 50), (NOW, 50), False),
        ((NOW, 50), (NOW, 51), True),
        ((NOW, 5), (OLD, 99), False),
        ((OLD, 99), (NOW, 1), True),
        ((OLD, 50), (OLD, 50), False),
        ((OLD, 50), (OLD, 51), True),
        ((OLDER, 50), (OLD, 1), True),
    ],
)
def test_went_back(stored: tuple[str, int] | None, committed: tuple[str, int] | None, went_back: bool) -> None:
    """A18, A19: an offset is compared only with one of the same topic."""
    assert found(stored, committed).went_back is went_back
