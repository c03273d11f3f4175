"""Whether everything held, mostly by the API's own count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from celery_durable.store.schema import SUCCEEDED
from examples.api_calls import progress
from examples.api_calls.api import Witness
from examples.api_calls.jobs import LIMITS, WORKFLOW_LIMITS, Job


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold."""

    holds: bool
    text: str


def judge(jobs: Sequence[Job], apps: Mapping[str, Any], witness: Witness, held_at_holder: int) -> list[Check]:
    """Everything that is checked, in the order in which it is told."""
    states = progress.states_of(apps)
    failed = sorted(job.id for job in jobs if states.get(job.id) != SUCCEEDED)
    missing = sorted(job.id for job in jobs if witness.effects[job.id] != 1)
    strangers = set(witness.effects) - {job.id for job in jobs}
    over = [_over(tenant, None, limit, witness) for tenant, limit in LIMITS.items()]
    over += [_over(tenant, workflow, limit, witness) for (tenant, workflow), limit in WORKFLOW_LIMITS.items()]
    above = [text for text in over if text]
    lost = set(progress.lost_tokens(apps))
    unexplained = [call.key for call in witness.left_behind if call.token not in lost]
    in_use = progress.read(apps).in_use
    return [
        Check(not failed, f"{len(jobs) - len(failed)} of {len(jobs)} jobs succeeded{_list(failed)}"),
        Check(
            not missing and not strangers,
            f"{len(jobs) - len(missing)} side effects, exactly one for each job{_list(missing)}"
            f" ({witness.replays} calls were repeated after their effect, and changed nothing)",
        ),
        Check(not above, f"no tenant and no workflow was ever above its limit, by the API's count{_list(above)}"),
        Check(
            not unexplained,
            f"{len(witness.left_behind)} calls overlapped with their successor, each left behind by the killed worker"
            f"{_list(unexplained)}"
            if witness.left_behind
            else "no call overlapped with its successor",
        ),
        Check(
            in_use == 0 and held_at_holder == 0, f"nothing is left in use (services {in_use}, holder {held_at_holder})"
        ),
    ]


def _over(tenant: str, workflow: str | None, limit: int, witness: Witness) -> str:
    most = witness.most(tenant, workflow)
    return f"{tenant}{'/' + workflow if workflow else ''} {most} of {limit}" if most > limit else ""


def _list(items: Sequence[str]) -> str:
    return f": {', '.join(items[:5])}{' …' if len(items) > 5 else ''}" if items else ""
