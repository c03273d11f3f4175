"""While more is counted than the limit allows, nothing is given, not even what is counted already."""

from __future__ import annotations

from holder_service.account import Client, Entry, Pair
from holder_service.allocation import Allocation, Terms
from tests.invariants import Invariants


def test_nothing_is_raised_while_more_is_counted_than_the_limit() -> None:
    """Case A12: a lease that was taken back, but not acknowledged, must not be given again: others use its permits.

    Three run in one group, and the other one may still have three by an old reply: six are counted at limit 5. The
    old reply may be void; a new one that says three again would make it true.
    """
    busy = Pair(claimed=3, used=3, waiting=9, served=5, entries=[Entry(1, 0)])
    lowered = Pair(claimed=1, used=1, waiting=9, served=1, entries=[Entry(1, 3), Entry(2, 0)])
    client = Client("incarnation", seq=1, sent=2, pairs={"busy": busy, "lowered": lowered})
    terms = Terms(
        limit=5,
        stopped=None,
        group_limit=lambda _: None,
        now_ms=0,
        version=3,
        turn_ms=200,
        turn_max_ms=1_000,
        fresh_ms=5_000,
        lease_extra_max=16,
        claim_window_ms=10_000,
    )
    allocation = Allocation({"a": client}, terms)
    assert allocation.account.used == 6
    allocation.run()
    Invariants().not_over("a", allocation.account.used, terms.limit, busy.newest.permits + lowered.newest.permits)
    assert allocation.account.used == 6

    del lowered.entries[0]  # acknowledged: now only one is counted
    Allocation({"a": client}, terms).run()
    assert busy.used + lowered.newest.permits == 5
