"""The jobs of the demo: calls of an API, one JSON object a line, and the limits that they must keep."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = Path(__file__).with_name("jobs.jsonl")
SERVICES = ("billing", "crm")
LIMITS = {"acme": 5, "globex": 4, "initech": 3, "hooli": 2, "umbrella": 2, "stark": 1}
"""Calls in flight that the API allows each tenant, from all services together."""
WORKFLOW_LIMITS = {("acme", "nightly-sync"): 2}
"""Of these, calls in flight that one workflow of a tenant may have."""


@dataclass(frozen=True, slots=True)
class Job:
    """One call to make."""

    id: str
    """Operation ID, and the idempotency key of the call."""
    service: str
    tenant: str
    workflow: str | None
    ms: int
    """How long the API works on it."""
    flaky: bool
    """The API refuses it the first time, so that it is retried."""


def load(count: int | None = None, path: Path = FILE) -> list[Job]:
    """The first ``count`` jobs of the file, or all."""
    lines = path.read_text().splitlines()
    return [Job(**json.loads(line)) for line in lines[:count]]


def save(jobs: Sequence[Job], path: Path = FILE) -> None:
    """Writes the jobs, one a line."""
    path.write_text("".join(json.dumps(asdict(job)) + "\n" for job in jobs))
