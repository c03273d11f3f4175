"""The holder's side of the simulator: instances on one database, each with production's own loops."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from holder_service import commands
from holder_service.main import Holder
from holder_service.settings import HolderSettings
from tests.simulation.databases import SimulatedDatabase, holder_slot, holder_tables
from tests.simulation.processes import Process
from tests.simulation.services import TOPIC_PREFIX

if TYPE_CHECKING:
    from tests.simulation.shells import World

GROUP_ID = "holders"


@cache
def holder_settings(reporting_lifetime_s: float) -> HolderSettings:
    """The settings of every instance."""
    return HolderSettings(
        database_url="sqlite:///simulated.sqlite3",
        group_id=GROUP_ID,
        kafka_bootstrap_servers="simulated:9092",
        topic_prefix=TOPIC_PREFIX,
        claim_window_s=2.0,
        claim_window_max_s=60.0,
        reporting_lifetime_s=reporting_lifetime_s,
        poll_max_ms=5_000,
        kafka_publish_deadline_ms=3_000,
        _env_file=None,
    )


class HolderProcess(Process):
    """One instance."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, f"holder-{number}")
        self.number = number
        self.run(self._start)

    def _start(self) -> None:
        database = SimulatedDatabase(holder_slot())
        Holder(database, holder_tables(), self.world.holder_settings).start()


class Operator(Process):
    """Who sits at the holder's command line."""

    def go(self, account: str | None = None) -> bool:
        """``holder-service go``. Returns whether it was obeyed."""

        def work() -> bool:
            try:
                commands.go(SimulatedDatabase(holder_slot()), holder_tables(), account)
            except commands.CommandRefused:
                return False
            return True

        return bool(self.run(work))
