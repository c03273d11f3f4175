"""The checker of chaos runs turns red for each thing that must not happen, and for a run that shows nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos import history
from tests.chaos.bodies import runs_of
from tests.chaos.checker import WHOLE
from tests.chaos.history import Exited, Fault, Final, FinalOperation, Stall, Started
from tests.chaos.reasons import POSTGRESQL_RESTART
from tests.unit.chaos_scene import GROUP, Scene, kinds, ns


@pytest.fixture
def scene() -> Scene:
    """Two operations beside each other, and one of each plan after them."""
    scene = Scene()
    scene.operation("one", (1, 2, "returned"))
    scene.operation("two", (1.5, 2.5, "returned"), group=GROUP)
    scene.operation("fails", (3, 4, "failed"), plan="fail")
    scene.operation("retries", (5, 6, "retry"), (6.5, 7, "retry"), (7.5, 8, "returned"), plan="retry")
    scene.operation("dies", (9, 9.5, "died"), (10, 10.5, "died"), plan="die", pids=(71, 72))
    scene.operation("cancelled", (11, 12, "aborted"), plan="cancel")
    scene.operation("cancelled early", plan="cancel")
    return scene


def test_a_good_history_is_good_and_was_looked_at(scene: Scene) -> None:
    verdict = scene.check()
    assert not verdict.violations
    assert not verdict.blind()
    assert verdict.runs == 9
    assert not verdict.explained


def test_a_history_of_nothing_is_blind() -> None:
    assert set(Scene().check().blind()) == set(WHOLE) - {"quiescence"}


def above_the_limit(scene: Scene) -> None:
    scene.operation("three", (1.9, 3, "returned"))


def above_the_limit_of_a_group(scene: Scene) -> None:
    scene.operation("three", (2.1, 3, "returned"), group=GROUP)


def above_the_limit_by_a_body_that_nothing_killed(scene: Scene) -> None:
    scene.operation("silent", (0.5, None, ""))


def ran_beside_itself(scene: Scene) -> None:
    scene.operation("double", (20, 22, "returned"), (21, 22, "returned"))
    scene.fault(POSTGRESQL_RESTART, 20.5, 21)


def ran_beside_a_frozen_one_too_early(scene: Scene) -> None:
    scene.operation("frozen", (20, 30, "aborted"), (23, 24, "returned"), pids=(5, 6))
    scene.fault("worker-freeze", 20.5, 29.9, pids=(5,))


def went_on_long_after_it_was_continued(scene: Scene) -> None:
    scene.operation("frozen", (20, 45, "aborted"), (25, 26, "returned"), pids=(5, 6))
    scene.fault("worker-freeze", 20.5, 26, pids=(5,))


def started_one_attempt_twice(scene: Scene) -> None:
    scene.operation("again", (20, 21, "returned"), (22, 23, "returned"))
    scene.events = [
        replace(event, attempt=1) if isinstance(event, Started) and event.operation == "again" else event
        for event in scene.events
    ]
    scene.fault(POSTGRESQL_RESTART, 20.5, 21)


def lost_from_the_table(scene: Scene) -> None:
    del scene.rows["one"]


def never_ended(scene: Scene) -> None:
    scene.spoil("one", state="queued")


def ended_in_another_way(scene: Scene) -> None:
    scene.spoil("fails", state="succeeded")


def was_not_cancelled(scene: Scene) -> None:
    scene.operation("cancelled", (20, 21, "returned"), plan="cancel")
    scene.spoil("cancelled", state="succeeded")


def succeeded_without_running(scene: Scene) -> None:
    scene.operation("ghost")


def retried_too_little(scene: Scene) -> None:
    scene.operation("retried", (20, 21, "retry"), (22, 23, "returned"), plan="retry")


def succeeded_though_its_last_body_was_stopped(scene: Scene) -> None:
    scene.operation("stopped", (20, 21, "aborted"))


def has_the_result_of_a_stale_run(scene: Scene) -> None:
    scene.operation("frozen", (20, 26, "aborted"), (25, 27, "returned"), pids=(5, 6))
    scene.fault("worker-freeze", 20.5, 25.9, pids=(5,))
    scene.spoil("frozen", result="frozen-1")


def ran_an_attempt_that_the_row_does_not_know(scene: Scene) -> None:
    scene.spoil("retries", attempt=2)


def began_and_never_ended(scene: Scene) -> None:
    scene.operation("silent", (30, None, ""))


def a_process_ended_by_itself(scene: Scene) -> None:
    scene.events.append(Exited(target="a-dispatcher", code=1, time_ns=ns(30)))


def left_a_footprint(scene: Scene) -> None:
    scene.final = replace(scene.final, footprint=1)


def left_something_in_use(scene: Scene) -> None:
    scene.final = replace(scene.final, in_use=1)


def left_something_waiting(scene: Scene) -> None:
    scene.final = replace(scene.final, waiting=1)


def left_a_message(scene: Scene) -> None:
    scene.final = replace(scene.final, left=("outbox of a: 1",))


def states_do_not_add_up(scene: Scene) -> None:
    scene.final = replace(scene.final, states={"succeeded": 3, "failed": 1})


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (above_the_limit, "bound"),
        (above_the_limit_of_a_group, "bound"),
        (above_the_limit_by_a_body_that_nothing_killed, "bound"),
        (ran_beside_itself, "overlap"),
        (ran_beside_a_frozen_one_too_early, "overlap"),
        (went_on_long_after_it_was_continued, "overlap"),
        (started_one_attempt_twice, "twice"),
        (lost_from_the_table, "lost"),
        (never_ended, "lost"),
        (ended_in_another_way, "lost"),
        (was_not_cancelled, "lost"),
        (succeeded_without_running, "lost"),
        (retried_too_little, "lost"),
        (succeeded_though_its_last_body_was_stopped, "outcome"),
        (has_the_result_of_a_stale_run, "stale"),
        (ran_an_attempt_that_the_row_does_not_know, "stale"),
        (began_and_never_ended, "unfinished"),
        (a_process_ended_by_itself, "exit"),
        (left_a_footprint, "rest"),
        (left_something_in_use, "rest"),
        (left_something_waiting, "rest"),
        (left_a_message, "rest"),
        (states_do_not_add_up, "total"),
    ],
)
def test_each_violation_is_found(scene: Scene, spoil: Callable[[Scene], None], kind: str) -> None:
    spoil(scene)
    assert kind in kinds(scene.check())


def test_a_body_may_begin_after_its_successor_has_ended_if_it_was_frozen_before(scene: Scene) -> None:
    """At limit 1 it is not counted beside what has the permit by then."""
    account = "shared:one~1"
    scene.operation("late", (30.1, 30.2, "aborted"), (26, 27, "returned"), pids=(5, 6), account=account)
    scene.only_beat("late-1", 20)
    scene.operation("other", (29, 31, "returned"), account=account)
    assert kinds(scene.check()) >= {"overlap", "bound", "unexplained"}
    scene.fault("worker-freeze", 20.1, 30, pids=(5,))
    assert not scene.check().violations


def test_a_worker_that_celery_ends_by_its_own_mistake_is_no_violation(scene: Scene) -> None:
    said = "[2026-01-01 00:00:00,000: CRITICAL/MainProcess] Unrecoverable error: ValueError('file descriptor is None')"
    scene.events.append(Exited(target="a-prefork", code=1, time_ns=ns(30), said=said))
    assert scene.check().violations == []
    scene.events.append(Exited(target="a-prefork", code=1, time_ns=ns(30), said=said.replace("is None", "is 7")))
    assert [violation.kind for violation in scene.check().violations] == ["exit"]


def test_an_operation_that_was_left_behind_counts_once(scene: Scene) -> None:
    """At limit 1 its own successor is not above the limit; another operation is, until its timeout is over."""
    account = "shared:one~1"
    scene.operation("frozen", (20, 30.1, "aborted"), (25, 26, "returned"), pids=(5, 6), account=account)
    scene.fault("worker-freeze", 20.5, 30, pids=(5,))
    assert not scene.check().violations
    scene.operation("other", (22, 22.5, "returned"), account=account)
    assert kinds(scene.check()) == {"bound"}


def test_a_heartbeat_moves_the_moment_when_another_may_begin(scene: Scene) -> None:
    scene.operation("frozen", (20, 40.1, "aborted"), (28, 29, "returned"), pids=(5, 6))
    scene.fault("worker-freeze", 25.5, 40, pids=(5,))
    scene.only_beat("frozen-1", 23.9)
    assert not scene.check().violations
    scene.only_beat("frozen-1", 25)
    assert kinds(scene.check()) == {"overlap"}


def test_a_history_comes_back_from_its_file(scene: Scene, tmp_path: Path) -> None:
    scene.fault("worker-kill", 20, 21, pids=(5, 6))
    scene.events.append(Stall(what="some", lasted_s=1.5, time_ns=ns(40)))
    events = sorted(scene.events, key=lambda event: event.time_ns)
    for event in events:
        history.write(tmp_path / "history", event)
    found = history.read(tmp_path / "history")
    assert found == events
    assert {operation: len(runs) for operation, runs in runs_of(found).items()} == {
        "one": 1,
        "two": 1,
        "fails": 1,
        "retries": 3,
        "dies": 2,
        "cancelled": 1,
    }


def test_a_history_is_judged_as_it_was_written(tmp_path: Path) -> None:
    """The end too, as a run collects it: a folder that was kept gives the same verdict later."""
    path, rows = tmp_path / "history.jsonl", {"op": FinalOperation("a", "succeeded", 2, "token")}
    written = [
        Fault(number=1, kind="worker-kill", target="w", pids=(1, 2)),
        Stall(what="disk", lasted_s=1.5),
        Final(operations=rows, states={"succeeded": 1}, in_use=0, waiting=0, footprint=0, left=["outbox of a: 1"]),
    ]
    history.write(path, *written)
    assert history.read(path) == written
