"""Where to begin reading a partition, given what SQL, the topic and the group say. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from celery_durable.store.offsets import Position


@dataclass(frozen=True, slots=True)
class Witness:
    """The group's committed offset, and the ID of the topic that it was committed in."""

    offset: int
    topic_id: str


@dataclass(frozen=True, slots=True)
class Opening:
    """What was found when this member took over a partition."""

    partition: int
    topic_id: str
    low: int
    """The first offset that the topic still has."""
    high: int
    """Its end at this moment: the offset that the next message will get."""
    stored: Position | None
    """The position in SQL, read after ``committed``."""
    committed: int | None
    """The group's committed offset, None if there is none."""
    start: int
    """Where reading begins."""
    recreated: bool
    """The topic is another one than the stored position's, or ends before it: it is read from its start (case B8)."""
    trimmed: bool
    """Retention took messages that were not read yet (case B8)."""
    went_back: bool
    """SQL is behind the committed offset: the database was lost, or restored to an earlier state (section 8)."""


def open_partition(
    partition: int, topic_id: str, low: int, high: int, stored: Position | None, committed: Witness | None
) -> Opening:
    """Compares the stored position with the topic and with the witness, which must have been read before it."""
    recreated = stored is not None and (stored.topic_id != topic_id or stored.next_offset > high)
    trimmed = stored is not None and not recreated and stored.next_offset < low
    start = low if stored is None or recreated or trimmed else stored.next_offset
    return Opening(
        partition=partition,
        topic_id=topic_id,
        low=low,
        high=high,
        stored=stored,
        committed=None if committed is None else committed.offset,
        start=start,
        recreated=recreated,
        trimmed=trimmed,
        went_back=committed is not None and went_back(topic_id, stored, committed),
    )


def went_back(topic_id: str, stored: Position | None, committed: Witness) -> bool:
    """Whether SQL is behind the witness, which must have been read before ``stored``."""
    if stored is None:
        return True
    if stored.topic_id == committed.topic_id:
        return stored.next_offset < committed.offset
    # SQL once had the witness's topic. It has moved on only if it now has the one that exists.
    return stored.topic_id != topic_id
