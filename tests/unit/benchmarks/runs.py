"""Runs that were never measured."""

from __future__ import annotations

from benchmarks.report.record import Measured, Run


def run(started_at: str, samples: dict[str, dict[str, list[dict[str, float]]]], commit: str = "0123456") -> Run:
    """A run with those samples by scenario and contender."""
    scenarios = {
        name: Measured("What it measures.", {"celery-durable": "defaults"}, contenders)
        for name, contenders in samples.items()
    }
    return Run("python -m benchmarks", started_at, commit, {"processor": "2 x P"}, scenarios)


def rates(*values: float) -> list[dict[str, float]]:
    """A repetition for each rate."""
    return [{"rate": value} for value in values]


def grown(*points: tuple[float, dict[str, float]]) -> Measured:
    """A scenario that grows, measured once at each point."""
    names = [f"{at:,.0f}" for at, _ in points]
    samples = {name: [figures] for name, (_, figures) in zip(names, points, strict=True)}
    at = {name: place for name, (place, _) in zip(names, points, strict=True)}
    return Measured("What grows.", {}, samples, axis="accounts", at=at)
