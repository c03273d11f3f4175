"""A repeat is explained by what kept its own attempt from being renewed, and by nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.chaos.bodies import DIES
from tests.chaos.history import Exited, Stall
from tests.chaos.reasons import FREEZE, POSTGRESQL_RESTART, STALL
from tests.unit.chaos_scene import Scene, kinds, ns


@pytest.fixture
def scene() -> Scene:
    return Scene()


def ran_twice_without_a_fault(scene: Scene) -> None:
    scene.operation("again", (20, 21, "returned"), (22, 23, "returned"))


def ran_twice_and_the_fault_hit_another_process(scene: Scene) -> None:
    scene.operation("again", (20, 21, "returned"), (22, 23, "returned"), pids=(5, 6))
    scene.fault("worker-kill", 20.5, 21, pids=(7,))


def ran_twice_and_the_fault_was_over_before(scene: Scene) -> None:
    scene.fault(POSTGRESQL_RESTART, 18, 19)
    scene.operation("again", (20, 21, "returned"), (22, 23, "returned"))


def ran_twice_and_no_message_broker_explains_it(scene: Scene) -> None:
    scene.operation("again", (20, 21, "returned"), (22, 23, "returned"))
    for kind in ("redis-flush", "rabbitmq-purge", "kafka-kill", "dispatcher-kill", "holder-kill"):
        scene.fault(kind, 20.5, 21)


def ran_twice_and_the_process_was_killed_long_after(scene: Scene) -> None:
    scene.operation("again", (20, 21, "returned"), (31, 32, "returned"), pids=(5, 6))
    scene.fault("worker-kill", 30, 30.5, pids=(5,))


def ran_twice_and_was_killed_after_it_had_settled(scene: Scene) -> None:
    scene.operation("again", (20, 21, "returned"), (25, 26, "returned"), pids=(5, 6))
    scene.settle("again-1", 21.1)
    scene.fault("worker-kill", 21.2, 22, pids=(5,))


def ran_twice_and_was_frozen_for_a_moment(scene: Scene) -> None:
    scene.operation("again", (20, 24, "aborted"), (25, 26, "returned"), pids=(5, 6))
    scene.fault("worker-freeze", 21, 22.5, pids=(5,))


def ran_twice_and_was_frozen_before_its_last_heartbeat(scene: Scene) -> None:
    scene.operation("again", (20, 29, "aborted"), (30, 31, "returned"), pids=(5, 6))
    scene.fault("worker-freeze", 20.5, 24, pids=(5,))
    scene.beat("again-1", 24.01)
    scene.beat("again-1", 25)


def ran_twice_and_was_frozen_long_before_it_was_aborted(scene: Scene) -> None:
    scene.operation("again", (20, 40, "aborted"), (41, 42, "returned"), pids=(5, 6))
    scene.fault("worker-freeze", 20.1, 23.5, pids=(5,))
    for tenth in range(235, 400, 8):
        scene.beat("again-1", tenth / 10)


def ran_twice_and_was_beaten_until_it_was_aborted(scene: Scene) -> None:
    scene.operation("again", (20, 23.7, "aborted"), (25, 26, "returned"), pids=(5, 6))
    scene.fault("worker-freeze", 20.2, 22.9, pids=(5,))
    scene.beat("again-1", 22.901)


def ran_twice_and_was_frozen_after_its_timeout(scene: Scene) -> None:
    scene.operation("again", (20, 33, "aborted"), (27, 28, "returned"), pids=(5, 6))
    scene.fault("worker-freeze", 24.1, 32.9, pids=(5,))


def ran_twice_and_another_process_was_frozen(scene: Scene) -> None:
    scene.operation("again", (20, 23.9, "aborted"), (25, 26, "returned"), pids=(5, 6))
    scene.fault("worker-freeze", 20, 25, pids=(6, 7))


def ran_twice_and_the_database_was_away_for_a_moment(scene: Scene) -> None:
    scene.operation("again", (20, 23.6, "aborted"), (25, 26, "returned"), pids=(5, 6))
    scene.fault(POSTGRESQL_RESTART, 21, 22)


def ran_twice_and_the_database_was_away_after_its_timeout(scene: Scene) -> None:
    scene.operation("again", (20, 23.6, "aborted"), (35, 36, "returned"), pids=(5, 6))
    scene.fault(POSTGRESQL_RESTART, 25, 34)


def ran_twice_and_another_database_stalled(scene: Scene) -> None:
    scene.operation("again", (20, 23.6, "aborted"), (25, 26, "returned"), pids=(5, 6))
    scene.events.append(Stall(what="a database", service="b", lasted_s=4, time_ns=ns(24)))


def one_fault_and_two_repeats(scene: Scene) -> None:
    """The process that a planned retry left is killed later: that explains nothing of another repeat."""
    scene.operation(
        "again",
        (20, 20.5, "retry"),
        (21, 21.5, "retry"),
        (22, 23, "returned"),
        (29, 30, "returned"),
        plan="retry",
        pids=(5, 5, 6, 7),
    )
    scene.settle("again-1", 20.6)
    scene.settle("again-2", 21.6)
    scene.fault("worker-kill", 21.8, 22.5, pids=(5,))


@pytest.mark.parametrize(
    "spoil",
    [
        ran_twice_without_a_fault,
        ran_twice_and_the_fault_hit_another_process,
        ran_twice_and_the_fault_was_over_before,
        ran_twice_and_no_message_broker_explains_it,
        ran_twice_and_the_process_was_killed_long_after,
        ran_twice_and_was_killed_after_it_had_settled,
        ran_twice_and_was_frozen_for_a_moment,
        ran_twice_and_was_frozen_before_its_last_heartbeat,
        ran_twice_and_was_frozen_long_before_it_was_aborted,
        ran_twice_and_was_beaten_until_it_was_aborted,
        ran_twice_and_was_frozen_after_its_timeout,
        ran_twice_and_another_process_was_frozen,
        ran_twice_and_the_database_was_away_for_a_moment,
        ran_twice_and_the_database_was_away_after_its_timeout,
        ran_twice_and_another_database_stalled,
        one_fault_and_two_repeats,
    ],
)
def test_a_repeat_without_a_fault_of_its_own_is_found(scene: Scene, spoil: Callable[[Scene], None]) -> None:
    spoil(scene)
    assert "unexplained" in kinds(scene.check())


def test_what_faults_explain_is_no_violation(scene: Scene) -> None:
    """Killed, frozen, left behind beside its successor, its database restarted, stalled: each is told by its reason."""
    scene.operation("killed", (20, None, ""), (25, 26, "returned"), pids=(5, 6))
    scene.fault("worker-kill", 20.5, 21, pids=(5, 4))
    scene.operation("settling", (30, 31, "returned"), (35, 36, "returned"), pids=(7, 8))
    scene.fault("worker-child-kill", 31.001, 31.1, pids=(7,))
    scene.operation("frozen", (40, 50.1, "aborted"), (45, 46, "returned"), pids=(9, 10))
    scene.fault("worker-freeze", 40.5, 50, pids=(9,))
    scene.operation("cut off", (60, 63.6, "aborted"), (65, 66, "returned"), pids=(11, 12))
    scene.fault(POSTGRESQL_RESTART, 60.5, 64)
    scene.operation("slow", (70, 73.6, "aborted"), (75, 76, "returned"), pids=(13, 14))
    scene.events.append(Stall(what="the driver's sleep", lasted_s=3, time_ns=ns(73.5)))
    scene.operation("hindered twice", (90, 93.6, "aborted"), (95, 96, "returned"), pids=(18, 19))
    scene.fault("worker-child-freeze", 90.1, 91.5, pids=(18,))
    scene.events.append(Stall(what="a database", service="a", lasted_s=1.5, time_ns=ns(92.6)))
    scene.operation("beaten too late", (100, 103.7, "aborted"), (104, 105, "returned"), pids=(20, 21))
    scene.fault("worker-child-freeze", 100.2, 103.7, pids=(20,))
    scene.beat("beaten too late-1", 103.701)
    scene.operation("beside", (80, None, ""), (85, 86, "returned"), pids=(15, 16))
    scene.operation("murderer", (80, 81, "died"), (82, 83, "died"), plan="die", pids=(15, 17))
    scene.events.append(Exited(target="a-dispatcher", code=2, time_ns=ns(66)))
    verdict = scene.check()
    assert not verdict.violations
    assert verdict.explained == {
        "worker-kill": 1,
        "worker-child-kill": 1,
        FREEZE: 2,
        POSTGRESQL_RESTART: 1,
        STALL: 2,
        DIES: 1,
    }


def test_a_body_may_begin_between_the_note_of_a_kill_and_the_kill(scene: Scene) -> None:
    scene.operation("killed", (20.001, None, ""), (25, 26, "returned"), pids=(5, 6))
    scene.fault("worker-kill", 20, 21, pids=(5,))
    assert not scene.check().violations


def test_a_worker_may_freeze_between_the_start_in_sql_and_the_body(scene: Scene) -> None:
    scene.operation("late", (30.1, 30.2, "returned"), (35, 36, "returned"), pids=(5, 6))
    scene.only_beat("late-1", 20)
    scene.fault("worker-freeze", 20.1, 30, pids=(5,))
    verdict = scene.check()
    assert not verdict.violations
    assert verdict.explained == {FREEZE: 1}
