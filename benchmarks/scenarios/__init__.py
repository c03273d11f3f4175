"""The scenarios, by name, in the order of the goals."""

from __future__ import annotations

from benchmarks.scenario import Scenario
from benchmarks.scenarios import backlog, contention, embedded, enqueue, growth, holder, latency, memory, throughput

_MODULES = (enqueue, throughput, latency, holder, contention, backlog, memory, embedded, growth)

SCENARIOS: dict[str, Scenario] = {scenario.name: scenario for module in _MODULES for scenario in module.SCENARIOS}
GROUPS: dict[str, tuple[str, ...]] = {growth.GROUP: tuple(scenario.name for scenario in growth.SCENARIOS)}
"""Several scenarios by one name."""
