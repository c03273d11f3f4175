"""A peer whose queue is in PostgreSQL, running."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import psycopg

from benchmarks.setting.child import Child
from benchmarks.setting.running import Running, call_together
from benchmarks.setting.tally import Tally
from tests.harness import Process


class SqlQueue(Running):
    """Some worker processes on one queue.

    :param accounts: how many the calls are spread over; 0: none.
    """

    SENDER: ClassVar[str]
    """``module:function`` of the process that sends."""
    ENDED: ClassVar[str]
    """Counts the calls that the peer has recorded as succeeded."""

    def __init__(self, url: str, tally: Tally, processes: Sequence[Process], accounts: int) -> None:
        super().__init__([tally], processes)
        self._url = url
        self._accounts = accounts
        self._connection = psycopg.connect(url, autocommit=True)

    def send(self, count: int) -> list[Child]:
        return call_together(self.SENDER, count, url=self._url, accounts=self._accounts)

    def ended(self) -> int:
        row = self._connection.execute(self.ENDED.encode()).fetchone()
        return 0 if row is None else int(row[0])

    def close(self) -> None:
        """Ends its connection."""
        self._connection.close()
