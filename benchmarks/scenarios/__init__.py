"""The scenarios, by name, in the order of the goals."""

from __future__ import annotations

from benchmarks.scenario import Scenario
from benchmarks.scenarios import backlog, contention, embedded, enqueue, holder, latency, memory, throughput

_MODULES = (enqueue, throughput, latency, holder, contention, backlog, memory, embedded)

SCENARIOS: dict[str, Scenario] = {scenario.name: scenario for module in _MODULES for scenario in module.SCENARIOS}
