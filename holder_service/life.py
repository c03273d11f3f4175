"""Which life of the holder's database this is: its one row with the epoch, the phase, and the rebuild's progress.

Every write is a compare-and-set on the row's revision, so of several instances that start at once exactly one decides
that this is a first start, or rebuilds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from sqlalchemy import Connection, select, update
from sqlalchemy.exc import IntegrityError

from celery_durable.store import counters
from celery_durable.store.clock import now_ms
from holder_service.store import VERSION_COUNTER, HolderTables, clock_ms

Phase = Literal["ready", "rebuilding", "topic_lost"]
"""``ready``: in service. ``rebuilding``: one instance reads the topics. ``topic_lost``: the topic was lost with the
database, so nobody knows what was given: nothing is given until the operator says go."""

_ONLY = 1


class Rebuild(BaseModel):
    """Who rebuilds, and how far it has come. An empty ``rebuilder`` gave it up: anyone may take it over."""

    model_config = ConfigDict(frozen=True)

    rebuilder: str = ""
    read: int = 0
    """Messages of the accounts topic that were applied."""
    total: int = 0
    """Messages that it had when the rebuild began."""


@dataclass(frozen=True, slots=True)
class Life:
    """The database's row, and the database's time when it was read."""

    epoch: int
    phase: Phase
    revision: int
    rebuild: Rebuild | None = None
    changed_at_ms: int = field(default=0, compare=False)
    now_ms: int = field(default=0, compare=False)

    @property
    def silent_ms(self) -> int:
        """How long nobody wrote the row."""
        return self.now_ms - self.changed_at_ms


class LifeChanged(Exception):
    """Another instance wrote the database's row in between: read it again and see what is to be done now."""


def load(connection: Connection, tables: HolderTables) -> Life | None:
    """The database's row; None in a database that has not begun its life."""
    record = connection.execute(_load(tables)).one_or_none()
    if record is None:
        return None
    return Life(
        epoch=record.epoch,
        phase=record.phase,
        revision=record.revision,
        rebuild=None if record.rebuild is None else Rebuild.model_validate_json(record.rebuild),
        changed_at_ms=record.changed_at,
        now_ms=record.now,
    )


@lru_cache(maxsize=64)
def _load(tables: HolderTables) -> Any:
    return select(tables.database, now_ms().label("now"))


def begin(connection: Connection, tables: HolderTables, phase: Phase) -> Life:
    """Begins the life of an empty database. Raises :class:`LifeChanged` if another instance did so first."""
    now = clock_ms(connection)
    life = Life(epoch=now, phase=phase, revision=1)
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
    """Moves the row on from ``old``; what is None stays, except the rebuild. Raises :class:`LifeChanged`.

    It takes the counter's lock first, as every holder's transaction does: none that began in the old life commits
    after this one.
    """
    counters.draw(connection, tables.counters, VERSION_COUNTER)
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
