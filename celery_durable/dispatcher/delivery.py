"""Delivery: sends admitted operations to Celery, again and again until they start (design, section 6).

It has a thread and a broker connection of its own, so a broker that hangs stalls no pass. A message is sent after the
commit that admitted its operation, and never holds a transaction open.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from sqlalchemy import Connection

from celery_durable.dispatcher.fronts import Fronts
from celery_durable.dispatcher.publisher import Publisher
from celery_durable.runtime import Runtime
from celery_durable.store import accounts
from celery_durable.store.admission import Admitted
from celery_durable.store.delivery import Deliveries, GivenBack, QueueLoad
from celery_durable.store.sending import Resends
from celery_durable.store.sql import parts

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger(__name__)

BREATH_S = 0.02
"""Pause of a loop that found little, or whose finds can wait, before it looks into SQL again: a look costs as much,
whatever it finds."""
RECOUNT_S = 0.2
"""How long a count of what was sent to a queue and has not started may be old; what this process sends is added."""
LOOKS_PUT_OFF_MAX = 3
"""So many steps in a row send only what was handed over, at most."""
HANDED_BATCHES_MAX = 50
"""Batches of operations that wait in memory at most; the rest are found in SQL when they are due again."""


def _nothing() -> None:
    """For a process without passes."""


class Delivery:
    """Delivers what passes hand over, and what is due in SQL. :meth:`hand_over` may be called from any thread.

    :param on_wakes: called after the commit of new rows of ``wakes``.
    """

    def __init__(self, app: Celery, runtime: Runtime, *, on_wakes: Callable[[], None] = _nothing) -> None:
        settings = runtime.settings
        self._database = runtime.database
        self._tables = runtime.tables
        self._on_wakes = on_wakes
        self._batch_max = settings.deliver_batch_max
        self._sent_max = settings.sent_not_started_max
        self._deadline_s = settings.publish_deadline_s
        self._resends = Resends.of(settings)
        self._statements = Deliveries(runtime.tables, runtime.database.dialect, self._resends)
        self._fronts = Fronts(settings.resend_min_s / 2)
        self._counted: dict[str, tuple[int, float]] = {}
        """By queue: how many were sent and have not started, and until when that is believed (monotonic)."""
        self._look_at_s = 0.0
        self._looks_put_off = 0
        self._publisher = Publisher(app, deadline_s=settings.publish_deadline_s)
        self._handed: deque[tuple[float, Admitted]] = deque()
        self._handed_max = HANDED_BATCHES_MAX * self._batch_max
        self._stopping = threading.Event()

    def hand_over(self, admitted: Sequence[Admitted]) -> None:
        """Takes operations that were admitted, in a transaction that is committed, to be sent now."""
        now = time.monotonic()
        room = self._handed_max - len(self._handed)
        self._handed.extend((now, one) for one in admitted[: max(0, room)])

    def step(self) -> float | None:
        """Sends one batch (a :data:`~celery_durable.scheduling.loop.Step`)."""
        handed = self._take_handed()
        pause_s = self._look_at_s - time.monotonic()
        # What was handed over goes first: a look takes as long as all the rest.
        looks = pause_s <= 0 and (not handed or self._looks_put_off >= LOOKS_PUT_OFF_MAX)
        self._looks_put_off = 0 if looks else self._looks_put_off + 1
        if not handed and not looks:
            return pause_s
        try:
            with self._database.autocommit() as connection:
                loads = self._statements.queues(connection) if looks else []
                sent = self._sent(connection, Counter(one.queue for _, one in handed), loads)
            again = self._again(loads) if looks else {}
            due = [load for load in loads if load.queue in again or self._has_new(load, sent)]
            # Where nothing at all was under way the next hint tells of something new: it is not to wait.
            if loads:
                self._look_at_s = time.monotonic() + BREATH_S
            if not handed and not due:
                return min((self._next_s(load) for load in loads), default=float("inf"))
            self._publisher.connect()
        except Exception:
            self._handed.extendleft(reversed(handed))
            raise
        taken, given_back = self._claim([one for _, one in handed], due, sent, again)
        self._tell(given_back)
        self._send(taken)
        if len(taken) - len(handed) + len(given_back) >= self._batch_max // 2:
            self._look_at_s = 0.0
        # Nothing taken: others hold the rows that are due. No reason to spin.
        return None if taken or given_back else float("inf")

    @property
    def under_way(self) -> int:
        """About how many operations were sent and have not started, in queues to which some were sent just now. May be
        asked by any thread."""
        now = time.monotonic()
        return sum(count for count, until_s in list(self._counted.values()) if until_s > now)

    def stop(self) -> None:
        """Has a step that is under way end early. May be called from any thread."""
        self._stopping.set()

    def close(self) -> None:
        """Drops the broker connection."""
        self._publisher.close()

    def _take_handed(self) -> list[tuple[float, Admitted]]:
        """What passes handed over, and when; but not what has waited so long that it is due again in SQL."""
        taken: list[tuple[float, Admitted]] = []
        oldest = time.monotonic() - 0.8 * self._resends.min_ms / 1000
        while self._handed and len(taken) < self._batch_max:
            since, one = self._handed.popleft()
            if since > oldest:
                taken.append((since, one))
        return taken

    def _sent(self, connection: Connection, handed: Counter[str], loads: Sequence[QueueLoad]) -> dict[str, int]:
        """How much was sent to each queue and has not started: those queues to which more is to be sent now."""
        sent = {}
        for queue in {*handed, *(load.queue for load in loads if load.new_due_s <= 0)}:
            count, until_s = self._counted.get(queue, (0, 0.0))
            now = time.monotonic()
            if now >= until_s or count >= self._sent_max:
                # Those handed over count as sent in SQL already.
                found = self._statements.sent(connection, queue, self._sent_max + handed[queue])
                count, until_s = max(0, found - handed[queue]), now + RECOUNT_S
                self._counted = {one: known for one, known in self._counted.items() if known[1] > now}
                self._counted[queue] = count, until_s
            sent[queue] = count
        return sent

    def _again(self, loads: Sequence[QueueLoad]) -> dict[str, int]:
        """The queues of which something is due again and is to be sent again; what is due until when (Unix ms)."""
        now = time.monotonic()
        self._fronts.look({load.queue: load.front_ms for load in loads if load.front_ms is not None}, now)
        again = {}
        for load in loads:
            until_ms = self._fronts.lost_until_ms(load.queue, now) if load.again_due_s <= 0 else None
            if until_ms is not None:
                again[load.queue] = until_ms
        return again

    def _has_new(self, load: QueueLoad, sent: Mapping[str, int]) -> bool:
        return load.new_due_s <= 0 and sent[load.queue] < self._sent_max

    def _next_s(self, load: QueueLoad) -> float:
        # What is new and due waits for room, which no time tells; what was sent and is due, for its front to stand.
        new_s = load.new_due_s if load.new_due_s > 0 else float("inf")
        return min(new_s, load.again_due_s if load.again_due_s > 0 else self._fronts.patience_s)

    def _claim(
        self,
        handed: Sequence[Admitted],
        due: Sequence[QueueLoad],
        sent: dict[str, int],
        again: Mapping[str, int],
    ) -> tuple[list[Admitted], list[GivenBack]]:
        """What to send now, within each queue's room, at most a batch or so, no queue left out; and what not to."""
        taken: list[Admitted] = []
        excess: list[Admitted] = []
        for one in handed:
            fits = sent[one.queue] < self._sent_max
            (taken if fits else excess).append(one)
            sent[one.queue] += 1 if fits else 0
        given_back: list[GivenBack] = []
        if due or excess:
            share = max(1, max(self._batch_max // 4, self._batch_max - len(taken)) // max(1, len(due)))
            with self._database.transaction("delivery.claim") as connection:
                self._statements.put_back(connection, excess)
                for load in due:
                    if (until_ms := again.get(load.queue)) is not None:
                        back = self._statements.give_back(connection, load.queue, share, until_ms)
                        lost = self._statements.claim_again(connection, load.queue, share, until_ms)
                        is_all = max(len(back), len(lost)) < share
                        self._fronts.sent_again(load.queue, time.monotonic(), is_all=is_all)
                        given_back += back
                        taken += lost
                    if self._has_new(load, sent):
                        room = min(share, self._sent_max - sent[load.queue])
                        new = self._statements.claim_new(connection, load.queue, room)
                        sent[load.queue] += len(new)
                        taken += new
                accounts.wake(connection, self._tables, (one.account for one in given_back))
        for queue, count in sent.items():
            until_s = self._counted[queue][1] if queue in self._counted else 0.0
            self._counted[queue] = count, until_s
        return taken, given_back

    def _send(self, taken: Sequence[Admitted]) -> None:
        """Publishes the messages. What could not be sent, by no fault of its own, is due again at once."""
        deadline = time.monotonic() + self._deadline_s
        if not taken:
            return
        with self._database.autocommit() as connection:
            outbound = self._statements.load(connection, taken)
        done = 0
        try:
            for some in parts(outbound, self._publisher.together_max):
                if time.monotonic() > deadline or self._stopping.is_set():
                    break
                for one, error in self._publisher.publish(some):
                    logger.warning(
                        "operation %s cannot be sent to queue %r: %s: %s; it is tried again later",
                        one.admitted.id,
                        one.admitted.queue,
                        type(error).__name__,
                        error,
                    )
                done += len(some)
        finally:
            if done < len(outbound):
                with self._database.transaction("delivery.put_back") as connection:
                    self._statements.put_back(connection, [one.admitted for one in outbound[done:]])

    def _tell(self, given_back: Sequence[GivenBack]) -> None:
        for one in given_back:
            logger.warning(
                "operation %s (task %s) was sent to queue %r %d times and not started: does a worker consume that "
                "queue and know that task? It waits %.0f s%s",
                one.id,
                one.task,
                one.queue,
                one.sends,
                one.wait_ms / 1000,
                "" if one.account is None else f", and account {one.account!r} has its permit back",
            )
        if any(one.account is not None for one in given_back):
            self._on_wakes()
