"""The bodies of a run, as their workers know them and not as the rows say: which of them really run at this instant.

A body runs from the start that its worker was granted until it returns or its process dies, and counts no longer than
the heartbeat timeout after its last good heartbeat: from then on its operation may run elsewhere, and is counted there.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.shells import World


class Runs:
    """Looks at the bodies of all workers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.called: dict[str, tuple[str, str]] = {}
        """The account and group that each operation was called with."""

    def bound(self) -> None:
        """No more bodies run than may. What the bound of the rows excepts is excepted."""
        running = self._running()
        checks = self.world.checks
        for account, by_group in running.items():
            group_limits = {group: limit for (of, group), limit in checks.allowed_groups.items() if of == account}
            self.world.invariants.bodies(by_group, checks.allowed.get(account, 0), group_limits)

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
