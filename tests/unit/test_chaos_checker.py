"""The checker of chaos runs turns red for each thing that must not happen, and for a run that shows nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.chaos import history
from tests.chaos.bodies import DIES, runs_of
from tests.chaos.checker import WHOLE, Final, FinalOperation, Verdict, check
from tests.chaos.history import Beat, Ended, Enqueued, Event, Exited, Fault, FaultOver, Settled, Stall, Started
from tests.chaos.plans import PLANS
from tests.chaos.reasons import FREEZE, POSTGRESQL_RESTART, STALL

TIMEOUT_S = 4.0
ACCOUNT, GROUP = "shared:acme~2", "wf~1"


def ns(seconds: float) -> int:
    return round(seconds * 1e9)


@dataclass
class Scene:
    """A history and its end, as they should be unless a test spoils them. Times in seconds."""

    events: list[Event] = field(default_factory=list)
    rows: dict[str, FinalOperation] = field(default_factory=dict)
    final: Final = field(default_factory=lambda: Final({}, {}, in_use=0, waiting=0, footprint=0))
    faults: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def operation(
        self,
        name: str,
        *runs: tuple[float, float | None, str],
        plan: str = "succeed",
        account: str = ACCOUNT,
        group: str = "",
        pids: tuple[int, ...] = (),
    ) -> None:
        """An operation whose bodies ran from, to (None: it never said so), and how they ended."""
        self.events.append(Enqueued(operation=name, service="a", plan=plan, account=account, group=group, time_ns=0))
        for number, (begin, end, how) in enumerate(runs, start=1):
            token, pid = f"{name}-{number}", pids[number - 1] if pids else 1000 + number
            self.events += [
                Beat(operation=name, token=token, time_ns=ns(begin - 0.01)),
                Started(
                    operation=name,
                    token=token,
                    attempt=number,
                    service="a",
                    account=account,
                    group=group,
                    pid=pid,
                    time_ns=ns(begin),
                ),
            ]
            if end is not None:
                self.events.append(Ended(operation=name, token=token, how=how, time_ns=ns(end)))
        state = PLANS[plan].state
        result = f"{name}-{len(runs)}" if state == "succeeded" else None
        self.rows[name] = FinalOperation("a", state, len(runs), result)

    def fault(self, kind: str, begin: float, end: float | None = None, *, pids: tuple[int, ...] = ()) -> None:
        number = next(self.faults)
        self.events.append(Fault(number=number, kind=kind, target="some", pids=pids, time_ns=ns(begin)))
        if end is not None:
            self.events.append(FaultOver(number=number, time_ns=ns(end)))

    def only_beat(self, token: str, at: float) -> None:
        """The run's last heartbeat, and its first."""
        self.events = [event for event in self.events if not (isinstance(event, Beat) and event.token == token)]
        self.events.append(Beat(operation=token.rpartition("-")[0], token=token, time_ns=ns(at)))

    def settle(self, token: str, at: float) -> None:
        self.events.append(Settled(operation=token.rpartition("-")[0], token=token, time_ns=ns(at)))

    def spoil(self, name: str, **changes: object) -> None:
        self.rows[name] = replace(self.rows[name], **changes)  # type: ignore[arg-type]

    def check(self) -> Verdict:
        states: dict[str, int] = {}
        for row in self.rows.values():
            states[row.state] = states.get(row.state, 0) + 1
        final = replace(self.final, operations=self.rows, states=self.final.states or states)
        events = sorted(self.events, key=lambda event: event.time_ns)
        return check(events, final, heartbeat_timeout_s=TIMEOUT_S)


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


def kinds(verdict: Verdict) -> set[str]:
    return {violation.kind for violation in verdict.violations}


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
    scene.only_beat("again-1", 25)


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
        (ran_twice_without_a_fault, "unexplained"),
        (ran_twice_and_the_fault_hit_another_process, "unexplained"),
        (ran_twice_and_the_fault_was_over_before, "unexplained"),
        (ran_twice_and_no_message_broker_explains_it, "unexplained"),
        (ran_twice_and_the_process_was_killed_long_after, "unexplained"),
        (ran_twice_and_was_killed_after_it_had_settled, "unexplained"),
        (ran_twice_and_was_frozen_for_a_moment, "unexplained"),
        (ran_twice_and_was_frozen_before_its_last_heartbeat, "unexplained"),
        (ran_twice_and_was_frozen_after_its_timeout, "unexplained"),
        (ran_twice_and_another_process_was_frozen, "unexplained"),
        (ran_twice_and_the_database_was_away_for_a_moment, "unexplained"),
        (ran_twice_and_the_database_was_away_after_its_timeout, "unexplained"),
        (ran_twice_and_another_database_stalled, "unexplained"),
        (one_fault_and_two_repeats, "unexplained"),
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
    scene.operation("beside", (80, None, ""), (85, 86, "returned"), pids=(15, 16))
    scene.operation("murderer", (80, 81, "died"), (82, 83, "died"), plan="die", pids=(15, 17))
    scene.events.append(Exited(target="a-dispatcher", code=2, time_ns=ns(66)))
    verdict = scene.check()
    assert not verdict.violations
    assert verdict.explained == {
        "worker-kill": 1,
        "worker-child-kill": 1,
        FREEZE: 1,
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


def test_a_body_may_begin_after_its_successor_has_ended_if_it_was_frozen_before(scene: Scene) -> None:
    """At limit 1 it is not counted beside what has the permit by then."""
    account = "shared:one~1"
    scene.operation("late", (30.1, 30.2, "aborted"), (26, 27, "returned"), pids=(5, 6), account=account)
    scene.only_beat("late-1", 20)
    scene.operation("other", (29, 31, "returned"), account=account)
    assert kinds(scene.check()) >= {"overlap", "bound", "unexplained"}
    scene.fault("worker-freeze", 20.1, 30, pids=(5,))
    assert not scene.check().violations


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
