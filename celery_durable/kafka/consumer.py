"""Reading partitions whose offsets live in SQL (rule 7): one member of a consumer group, and the traps of that.

The owner's loop is::

    batches = reader.read(timeout_s, limit)
    with database.transaction() as connection:
        for batch in batches:
            offsets.advance(connection, table, batch.old, batch.new)   # OffsetMoved: reader.drop(batch.partition)
            ...                                                        # the effects of batch.messages
    reader.commit(batches)

A batch that was not handed to :meth:`PartitionReader.commit` before the next ``read`` is read again, from where SQL
says by then: an owner whose transaction failed has nothing to undo. All methods are for one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from celery_durable.kafka.settings import KafkaSettings
from celery_durable.store.offsets import Position


@dataclass(frozen=True, slots=True)
class Received:
    """One message, as it came."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages of one partition, in order, and how they move its position: by compare-and-set from ``old`` to ``new``."""

    partition: int
    messages: Sequence[Received]
    old: Position | None
    """The position that SQL must still have; None: it must have no row."""
    new: Position


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
    """Where reading begins, unless the owner says otherwise."""
    recreated: bool
    """The topic is another one than the stored position's, or ends before it: it is read from its start (case B8)."""
    trimmed: bool
    """Retention took messages that were not read yet (case B8)."""
    went_back: bool
    """SQL is behind the committed offset: the database was lost, or restored to an earlier state (section 8)."""


Load = Callable[[], Mapping[int, Position]]
"""Reads the stored positions of the topic, by partition (:func:`celery_durable.store.offsets.load`)."""
OnOpen = Callable[[Sequence[Opening]], Mapping[int, int] | None]
"""Called before the first message of newly taken (or reopened) partitions. May give other starts, by partition (a
holder that rebuilds gives ``low``). What it raises closes the consumer, and ``read`` raises it."""
OnClose = Callable[[Collection[int]], None]
"""Called when partitions are no longer read by this member (revoked, lost or dropped): forget what is cached."""


class PartitionReader:
    """One member of the consumer group ``group_id`` on ``topic``.

    Guarantees: a message is given only after its partition was opened at a position that was compared with SQL, the
    topic and the group; within a partition messages come in order; nothing is skipped without ``trimmed`` or
    ``recreated``. It does not guarantee that no other member gives the same message: that is the compare-and-set's.

    :param load: reads the stored positions; called whenever partitions are opened.
    :param on_open: told of every partition that is opened.
    :param on_close: told of every partition that is no longer read.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        *,
        topic: str,
        group_id: str,
        load: Load,
        on_open: OnOpen | None = None,
        on_close: OnClose | None = None,
    ) -> None:
        raise NotImplementedError

    @property
    def partitions(self) -> frozenset[int]:
        """The partitions that this member reads now."""
        raise NotImplementedError

    def read(self, timeout_s: float, limit: int) -> list[Batch]:
        """Waits up to ``timeout_s`` for a first message, then takes what is there, at most ``limit`` messages.

        Empty when nothing came. Raises what :data:`Load` or :data:`OnOpen` raised, and :class:`KafkaException` when
        Kafka cannot be used; the next call starts anew.
        """
        raise NotImplementedError

    def commit(self, batches: Sequence[Batch]) -> None:
        """Says that the batches are committed in SQL: only then is the group's offset moved too, as a witness."""
        raise NotImplementedError

    def drop(self, partition: int) -> None:
        """Stops reading a partition after a lost compare-and-set.

        If the group still gives it to this member after a second, it is opened again from what SQL says then.
        """
        raise NotImplementedError

    def reopen(self, partitions: Collection[int] | None = None) -> None:
        """Opens partitions (None: all) again at the next ``read``, asking for their start through ``on_open``."""
        raise NotImplementedError

    def close(self) -> None:
        """Leaves the group, so that others take over at once. ``read`` may not be called again."""
        raise NotImplementedError


def read_to_end(settings: KafkaSettings, topic: str, *, deadline_s: float) -> Iterator[Received]:
    """Every message of the topic from its start to the end that it has now, without a group (the limits mirror).

    A topic that does not exist has none. Raises :class:`TimeoutError` after ``deadline_s`` seconds.
    """
    raise NotImplementedError
