"""Orders to processes: what to do at a crash point. ``tests/crashing/armed/sitecustomize.py`` is their other end."""

from __future__ import annotations

import os
from pathlib import Path

from celery_durable.crashpoints import POINTS

ARMED = Path(__file__).with_name("armed")


class Orders:
    """What the processes that are started with :attr:`env` do, and their children, however they are started.

    :param folder: a new folder of these orders' own.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    @property
    def env(self) -> dict[str, str]:
        """The environment of a process that obeys."""
        path = [str(ARMED), *filter(None, [os.environ.get("PYTHONPATH", "")])]
        return {"CRASH_FOLDER": str(self._folder), "PYTHONPATH": os.pathsep.join(path)}

    def give(self, *orders: str) -> None:
        """From now on obey these alone: ``POINT``, ``POINT:NTH`` or ``POINT:NTH=ACTION``, counted from 1 from now on.

        The action is ``kill`` (SIGKILL of the process itself, the default), ``sleep:SECONDS`` or ``raise``.

        :raises ValueError: there is no such crash point.
        """
        lines = []
        for order in orders:
            where, _, action = order.partition("=")
            point, _, nth = where.partition(":")
            if point not in POINTS:
                raise ValueError(f"{point}: there is no such crash point; celery_durable.crashpoints.POINTS has them")
            lines.append(f"{point} {int(nth or 1)} {action or 'kill'}\n")
        self.withdraw()
        for left in [*self._folder.glob("passed.*"), *self._folder.glob("died.*")]:
            left.unlink()
        partial = self._folder / "orders.partial"
        partial.write_text("".join(lines))
        partial.replace(self._folder / "orders")

    def withdraw(self) -> None:
        """From now on obey nothing."""
        (self._folder / "orders").unlink(missing_ok=True)

    def died(self, point: str) -> int | None:
        """The ID of the process that killed itself at the point; None: none has yet."""
        marker = self._folder / f"died.{point}"
        return int(marker.read_text()) if marker.exists() else None
