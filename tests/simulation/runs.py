"""The bodies of a run, as their workers know them and not as the rows say: which run at this instant, and why again.

A body runs from the start that its worker was granted until it returns or its process dies, and counts no longer than
the heartbeat timeout after its last good heartbeat: from then on its operation may run elsewhere, and is counted there.

An operation runs again only for a cause in the record of the attempt before: the body asked for it, or its worker died,
froze or was cut off for so long that its heartbeats were over, or nobody knows whether it was started at all.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.services import Service
    from tests.simulation.shells import World
    from tests.simulation.workers import Body

ASKED = ("retry", "requeue", "repeat", "lose")
"""Ends of a body that ask for another attempt."""

IN_DOUBT = "the start was not answered"
REPLACED = "the database was replaced"


class Runs:
    """Looks at the bodies of all workers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.called: dict[str, tuple[str, str]] = {}
        """The account and group that each operation was called with."""
        self._records: dict[tuple[str, str], list[Body]] = {}
        """By service and operation: what was started, or may have been."""

    def tried(self, body: Body) -> None:
        """A worker is about to ask for the start of this attempt, and may never hear the answer."""
        record = self._records.setdefault((body.worker.service.name, body.attempt.id), [])
        if body not in record:
            record.append(body)
            body.renewed_ms = self.world.clock.now_ms

    def refused(self, body: Body) -> None:
        """It was not started; nor before, by a try that was not answered, unless that is overdue by now."""
        if self.world.clock.now_ms < body.alive_until_ms:
            self._records[body.worker.service.name, body.attempt.id].remove(body)

    def started(self, body: Body) -> None:
        """It runs from now on, and must have a cause if it is not the first."""
        self.bound()
        self._caused(body)

    def _caused(self, body: Body) -> None:
        service, attempt = body.worker.service, body.attempt
        before: dict[int, list[Body]] = {}
        for earlier in self._records[service.name, attempt.id]:
            if earlier is not body:
                before.setdefault(earlier.attempt.attempt, []).append(earlier)
        who = f"{service.name} {attempt.id}"
        for earlier in before.get(attempt.attempt, ()):
            cause = self._cause(earlier)
            self.world.invariants.caused(who, attempt.attempt, cause if cause in (IN_DOUBT, REPLACED) else None)
        for number in range(1, attempt.attempt):
            causes = [self._cause(earlier) for earlier in before.get(number, ())]
            sure = [cause for cause in causes if cause not in (IN_DOUBT, REPLACED)]
            found = None if not causes or None in causes else (sure or causes)[0]
            self.world.invariants.caused(who, number + 1, found)
            if number + 1 == attempt.attempt:
                self.world.stats[f"again: {found}"] += 1

    def _cause(self, body: Body) -> str | None:
        """Why the operation may run again after this attempt; None: there is no reason."""
        if body.database_replaced:
            return REPLACED
        if not body.started:
            return IN_DOUBT
        if body.ending in ASKED:
            return "asked"
        if body.settled or self.world.clock.now_ms < body.alive_until_ms:
            return None
        return body.hindered if body.worker.alive else "died"

    def replaced(self, service: Service) -> None:
        """The service's database is an older copy: what has run since may run again, under the same numbers."""
        for (name, _), record in self._records.items():
            if name == service.name:
                for body in record:
                    body.database_replaced = True

    def copied(self, first: Service, second: Service) -> None:
        """The second service has what the first one has; what of it runs, runs at the first."""
        for (name, operation_id), record in list(self._records.items()):
            if name == first.name:
                copies = [replace(body, database_replaced=True) for body in record]
                self._records[second.name, operation_id] = copies

    def bound(self) -> None:
        """No more bodies run than may. What the bound of the rows excepts is excepted."""
        running = self._running()
        checks = self.world.checks
        for account, by_group in running.items():
            group_limits = {
                group: limit for (of, group), limit in checks.holder.allowed_groups.items() if of == account
            }
            self.world.invariants.bodies(by_group, checks.holder.allowed.get(account, 0), group_limits)

    def _running(self) -> dict[str, Counter[str]]:
        """How many bodies run, by account and group."""
        found: dict[str, Counter[str]] = {}
        now_ms, exempt = self.world.clock.now_ms, self.world.checks.exempt
        for service in self.world.services:
            for worker in service.workers:
                for body in worker.bodies if worker.alive else ():
                    if not body.returned and now_ms < body.alive_until_ms:
                        operation_id = body.attempt.id
                        if (service.name, operation_id) not in exempt:
                            account, group = self.called[operation_id]
                            found.setdefault(account, Counter())[group] += 1
        return found
