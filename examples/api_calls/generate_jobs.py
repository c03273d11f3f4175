"""``python -m examples.api_calls.generate_jobs``: writes ``jobs.jsonl``. The same seed gives the same file."""

from __future__ import annotations

import random

from examples.api_calls.jobs import FILE, LIMITS, SERVICES, WORKFLOW_LIMITS, Job, save

SEED = 20_240
COUNT = 300
FLAKY_SHARE = 0.06
WORKFLOW_SHARE = 0.3
MS_MIN, MS_MAX = 400, 1_600


def generate(seed: int = SEED, count: int = COUNT) -> list[Job]:
    """Jobs in random order, in proportion to the tenants' limits, so that all tenants end at about the same time."""
    draw = random.Random(seed)
    workflows = dict(WORKFLOW_LIMITS.keys())
    jobs = []
    for number in range(count):
        tenant = draw.choices(list(LIMITS), weights=list(LIMITS.values()))[0]
        jobs.append(
            Job(
                id=f"job-{number:04d}",
                service=draw.choice(SERVICES),
                tenant=tenant,
                workflow=workflows.get(tenant) if draw.random() < WORKFLOW_SHARE else None,
                ms=draw.randint(MS_MIN, MS_MAX),
                flaky=draw.random() < FLAKY_SHARE,
            )
        )
    return jobs


if __name__ == "__main__":
    save(generate())
    print(f"{COUNT} jobs in {FILE.name}")
