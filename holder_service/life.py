"""Which life of the holder's database this is: its one row with the epoch, the phase, and the rebuild's progress.

Every write is a compare-and-set on the row's revision, so of several instances that start at once exactly one decides
that this is a first start, or rebuilds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import BaseModel, ConfigDict
from sqlalchemy import Connection, select, update
from sqlalchemy.exc import IntegrityError

from celery_durable.store.clock import now_ms
from holder_service.store import HolderTables, clock_ms

Phase = Literal["ready", "rebuilding", "topic_lost"]
"""``ready``: in service. ``rebuilding``: one instance reads the topics. ``topic_lost``: the topic was lost together with
the database, so nobody knows what was given: nothing is given until the operator says go."""

_ONLY = 1


class Rebuild(BaseModel):
    """How far the rebuild has come. ``ends``: where each partition of the accounts topic ended when it began."""

    model_config = ConfigDict(frozen=True)

    rebuilder: str
    topic_id: str
    limits_read: bool = False
    ends: dict[int, int]
    positions: dict[int, int]

    @property
    def left(self) -> int:
        """Offsets still to be read."""
        return sum(max(0, end - self.positions.get(partition, 0)) for partition, end in self.ends.items())


@dataclass(frozen=True, slots=True)
class Life:
    """The database's row. ``changed_ms_ago`` is its age by the database's clock, for those who wait on a rebuild."""

    epoch: int
    born_at_ms: int
    phase: Phase
    revision: int
    rebuild: Rebuild | None = None
    changed_ms_ago: int = field(default=0, compare=False)


class LifeChanged(Exception):
    """Another instance wrote the database's row in between: read it again and see what is to be done now."""


def load(connection: Connection, tables: HolderTables) -> Life | None:
    """The database's row; None in a database that has not begun its life."""
    record = connection.execute(select(tables.database, now_ms().label("now"))).one_or_none()
    if record is None:
        return None
    return Life(
        epoch=record.epoch,
        born_at_ms=record.born_at,
        phase=record.phase,
        revision=record.revision,
        rebuild=None if record.rebuild is None else Rebuild.model_validate_json(record.rebuild),
        changed_ms_ago=record.now - record.changed_at,
    )


def begin(connection: Connection, tables: HolderTables, phase: Phase) -> Life:
    """Begins the life of an empty database. Raises :class:`LifeChanged` if another instance did so first."""
    now = clock_ms(connection)
    life = Life(epoch=now, born_at_ms=now, phase=phase, revision=1)
    values = {"only": _ONLY, "epoch": now, "born_at": now, "phase": phase, "revision": 1, "changed_at": now}
    try:
        connection.execute(tables.database.insert().values(values))
    except IntegrityError:
        raise LifeChanged from None
    return life


def change(
    connection: Connection,
    tables: HolderTables,
    old: Life,
    *,
    phase: Phase | None = None,
    epoch: int | None = None,
    rebuild: Rebuild | None = None,
) -> Life:
    """Moves the row on from ``old``; what is None stays, except the rebuild. Raises :class:`LifeChanged`."""
    new = replace(
        old,
        phase=old.phase if phase is None else phase,
        epoch=old.epoch if epoch is None else max(old.epoch, epoch),
        rebuild=rebuild,
        revision=old.revision + 1,
    )
    columns = tables.database.c
    statement = (
        update(tables.database)
        .where(columns.only == _ONLY, columns.revision == old.revision)
        .values(
            phase=new.phase,
            epoch=new.epoch,
            rebuild=None if rebuild is None else rebuild.model_dump_json(),
            revision=new.revision,
            changed_at=now_ms(),
        )
    )
    if connection.execute(statement).rowcount != 1:
        raise LifeChanged
    return new
