"""The demo's witness and verdict: each check is green when all is well, and red for the violation it is for."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from celery import Celery
from sqlalchemy import insert, update

from celery_durable.runtime import Runtime
from examples.api_calls import verdict
from examples.api_calls.api import Call, Witness, serve
from examples.api_calls.jobs import Job
from examples.api_calls.verdict import Check
from tests.unit.monitoring.rows import add, make_runtime

JOBS = [Job(id=f"job-{n}", service="billing", tenant="stark", workflow=None, ms=1, flaky=False) for n in range(2)]


def call(key: str, token: str = "first", *, tenant: str = "stark", workflow: str | None = None) -> Call:
    return Call(tenant, workflow, key, token)


class Scene:
    """Two jobs of a tenant with limit 1, done as they should be; a test spoils it before :meth:`checks`."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.witness = Witness()
        self.held_at_holder = 0
        for job in JOBS:
            add(runtime, job.id, "succeeded", account="tenant:stark")
            self.run(call(job.id))

    def run(self, *calls: Call) -> None:
        """The calls, in flight together."""
        for each in calls:
            self.witness.enter(each)
        for each in calls:
            self.witness.perform(each)
            self.witness.leave(each)

    def checks(self) -> list[Check]:
        app = Celery("billing", broker="memory://", set_as_current=False)
        app._celery_durable_runtime = self.runtime
        return verdict.judge(JOBS, {"billing": app}, self.witness, self.held_at_holder)


@pytest.fixture
def scene(sqlite_url: str) -> Iterator[Scene]:
    runtime = make_runtime(sqlite_url)
    yield Scene(runtime)
    runtime.database.dispose()


def test_all_is_well(scene: Scene) -> None:
    assert [check for check in scene.checks() if not check.holds] == []


def fail_a_job(scene: Scene) -> None:
    operations = scene.runtime.tables.operations
    with scene.runtime.database.transaction() as connection:
        connection.execute(update(operations).where(operations.c.id == "job-0").values(state="failed"))


def lose_an_effect(scene: Scene) -> None:
    del scene.witness.effects["job-0"]


def call_for_a_stranger(scene: Scene) -> None:
    scene.run(call("job-99"))


def exceed_a_limit(scene: Scene) -> None:
    scene.run(call("job-0"), call("job-1"))


def exceed_a_workflow(scene: Scene) -> None:
    scene.run(*(call(f"job-{n % 2}-{n}", tenant="acme", workflow="nightly-sync") for n in range(3)))


def overlap_without_a_lost_worker(scene: Scene) -> None:
    scene.run(call("job-0", "first"), call("job-0", "second"))


def leave_a_permit(scene: Scene) -> None:
    add(scene.runtime, "left", "running", account="tenant:stark")


def leave_a_permit_at_the_holder(scene: Scene) -> None:
    scene.held_at_holder = 1


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (fail_a_job, "1 of 2 jobs succeeded: job-0"),
        (lose_an_effect, "1 side effects, exactly one for each job: job-0"),
        (call_for_a_stranger, "exactly one for each job"),
        (exceed_a_limit, "by the API's count: stark 2 of 1"),
        (exceed_a_workflow, "by the API's count: acme/nightly-sync 3 of 2"),
        (overlap_without_a_lost_worker, "1 calls overlapped with their successor"),
        (leave_a_permit, "nothing is left in use (services 1, holder 0)"),
        (leave_a_permit_at_the_holder, "nothing is left in use (services 0, holder 1)"),
    ],
)
def test_each_violation_turns_its_check_red(scene: Scene, spoil: Callable[[Scene], None], text: str) -> None:
    spoil(scene)
    assert any(text in check.text for check in scene.checks() if not check.holds)


def test_an_overlap_is_excused_by_the_run_token_of_a_lost_attempt(scene: Scene) -> None:
    """The call that a killed worker left behind does not count beside the next attempt's."""
    scene.run(call("job-0", "first"), call("job-0", "second"))
    with scene.runtime.database.transaction() as connection:
        connection.execute(
            insert(scene.runtime.tables.attempts).values(
                operation_id="job-0", generation=1, attempt=1, outcome="lost", run_token="first", ended_at=1
            )
        )
    assert [check for check in scene.checks() if not check.holds] == []
    assert scene.witness.most("stark") == 1
    assert scene.witness.replays == 2  # the effect was there from the scene


def post(address: str, key: str, *, ms: int = 1) -> int:
    request = urllib.request.Request(
        f"{address}/tenants/acme/calls",
        data=json.dumps({"ms": ms, "workflow": "nightly-sync"}).encode(),
        headers={"Idempotency-Key": key, "X-Run-Token": "token"},
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_api_counts_what_reaches_it_over_http() -> None:
    witness = Witness(flaky=["flaky"])
    with serve(witness) as address:
        together = [threading.Thread(target=post, args=(address, f"k{n}"), kwargs={"ms": 300}) for n in range(3)]
        for thread in together:
            thread.start()
        for thread in together:
            thread.join()
        assert [post(address, "flaky"), post(address, "flaky")] == [503, 200]
    assert (witness.now("acme"), witness.most("acme"), witness.most("acme", "nightly-sync")) == (0, 3, 3)
    assert dict(witness.effects) == {"k0": 1, "k1": 1, "k2": 1, "flaky": 1}
    assert witness.runs["flaky"] == ["token", "token"]
