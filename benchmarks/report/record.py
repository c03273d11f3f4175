"""A run's record: what was measured, where and by which command. Kept as JSON in ``benchmarks/results/``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "results"

Figures = dict[str, float]
"""What one repetition measured, by name: ``rate`` (1/s), ``p50_ms``, ``p99_ms``, …"""


@dataclass
class Measured:
    """One scenario: the figures of each repetition, by contender."""

    what: str
    settings: dict[str, str] = field(default_factory=dict)
    """What is to be known about each contender's set-up."""
    samples: dict[str, list[Figures]] = field(default_factory=dict)
    axis: str = ""
    """What grows from one contender to the next."""
    at: dict[str, float] = field(default_factory=dict)
    """Where each contender stands on that axis."""

    def values(self, contender: str, figure: str) -> list[float]:
        """One figure of every repetition; empty if it was not measured."""
        return [sample[figure] for sample in self.samples.get(contender, []) if figure in sample]


@dataclass
class Run:
    """One run of the benchmarks."""

    command: str
    started_at: str
    """UTC, ISO 8601."""
    commit: str
    machine: dict[str, str] = field(default_factory=dict)
    scenarios: dict[str, Measured] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of its file, without the ending."""
        return f"{self.started_at[:16].replace(':', '')}Z-{self.commit[:7]}"


def dump(run: Run) -> str:
    """The run as JSON."""
    return json.dumps(asdict(run), indent=1) + "\n"


def parse(text: str) -> Run:
    """A run from its JSON."""
    raw = json.loads(text)
    scenarios = {name: Measured(**measured) for name, measured in raw.pop("scenarios").items()}
    return Run(**raw, scenarios=scenarios)


def store(run: Run, folder: Path = RESULTS) -> Path:
    """Writes the run and returns its file."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{run.name}.json"
    path.write_text(dump(run))
    return path


def load_all(folder: Path = RESULTS) -> list[Run]:
    """Every stored run, the oldest first."""
    return sorted((parse(path.read_text()) for path in folder.glob("*.json")), key=lambda run: run.started_at)


def newest_of_each(runs: Iterable[Run]) -> Mapping[str, Run]:
    """By scenario the newest run that measured it."""
    newest: dict[str, Run] = {}
    for run in sorted(runs, key=lambda one: one.started_at):
        newest.update(dict.fromkeys(run.scenarios, run))
    return newest
