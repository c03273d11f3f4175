"""Directed schedules on the pure cores: the cases that a random walk may miss, each message moved by hand."""

from __future__ import annotations

import pytest

from celery_durable.permits.messages import (
    MAX_INT,
    AccountReply,
    AccountReport,
    Forfeit,
    Pause,
    ReplyGroup,
    Resume,
    SetLimit,
    read_reply,
)
from tests.invariants import Invariants, InvariantViolation
from tests.simulation import mutations
from tests.simulation.stage import ACCOUNT, Stage
from tests.simulation.world import reads


def command(kind, seq=1, **values):
    return kind(client_id="ops", account=ACCOUNT, seq=seq, **values)


def lease(stage: Stage, name: str, number: int) -> None:
    """The client has ``number`` operations in use on a lease."""
    stage.enqueue(name, number)
    stage.deliver()
    assert stage.used(name) == number


def offered(stage: Stage, name: str = "b") -> bytes:
    """Client a uses the one permit; the other waits so long that it gets a grant, which is returned."""
    lease(stage, "a", 1)
    stage.enqueue(name)
    stage.deliver()
    stage.later(6_000)
    stage.end("a")
    stage.decide(stage.report("a"))
    reply = stage.reply(name)
    assert read_reply(reply).groups[0].offered == 1
    return reply


def test_nothing_of_a_grant_is_admitted_before_it_is_confirmed():
    """A2: a grant is claimed by a report and confirmed by a reply before anything of it is admitted."""
    stage = Stage("a", "b")
    grant = offered(stage)
    claim = stage.run_pass("b", grant)
    assert claim is not None
    assert stage.used("b") == 0
    stage.decide(stage.report("b"))
    assert stage.used("b") == 0
    stage.run_pass("b", stage.reply("b"))
    assert stage.used("b") == 1


def test_a_claim_within_a_lease_sends_no_message():
    """A3, A6: a spare permit of a warm lease serves a new operation with no message."""
    stage = Stage(limit=4)
    lease(stage, "a", 1)
    for _ in range(50):
        stage.later(300)
        stage.end()
        stage.enqueue()
        stage.enqueue()
        stage.end()
        assert stage.used() == 1
    assert not stage.reports
    assert stage.messages == 2


def test_a_grant_that_nobody_claimed_goes_back_and_is_asked_for_again():
    """A4: nothing was admitted, the operations are where they were, and the client asks again."""
    stage = Stage("a", "b")
    offered(stage)
    order = list(stage.client("b").waiting[""])
    stage.later(10_001)
    stage.decide()
    assert stage.footprint("b") == 0
    assert stage.client("b").waiting[""] == order
    assert read_reply(stage.replies["b"]).ack_wanted
    stage.deliver()
    assert stage.used("b") == 1


def test_a_holder_that_forgot_a_client_counts_what_it_has_in_use():
    """A5: what is in use stays in use and counts, the lease is void, nothing is lost."""
    stage = Stage("a", "b", limit=3)
    lease(stage, "a", 2)
    topic = [AccountReport.model_validate_json(stage.client("a").run_pass(stage.now_ms + 300_000)[0])]
    stage.later(300_000)
    stage.holder.lose_database(stage.now_ms)
    stage.decide(*topic)
    stage.holder.rebuilding = False
    stage.enqueue("b", 3)
    stage.decide(stage.report("b"))
    assert not read_reply(stage.replies["b"]).groups
    stage.deliver()
    assert stage.used("a") == 2
    assert stage.used("b") == 1
    assert stage.footprint("a") == 2


def test_a_claim_ceiling_is_never_passed():
    """A6: no claim beyond the cumulative ceiling, though releases make room under the level."""
    stage = Stage(limit=9)
    stage.enqueue(number=9)
    first = AccountReply(
        client_id="a", incarnation="first", account=ACCOUNT, epoch=9_999_999, version=1, answers=1,
        groups=(ReplyGroup(permits=3, claims=4),),
    )  # fmt: skip
    stage.run_pass("a", first)
    assert stage.used() == 3
    stage.end(number=3)
    assert stage.used() == 1
    report = reads(stage.report())
    stage.end()
    assert stage.used() == 0
    assert report.groups[0].claimed == 4
    assert report.groups[0].keeps == 1
    stage.invariants.require("ceiling", "level")


def test_what_was_given_back_takes_nothing_from_an_older_reply():
    """A7: whatever its version, a reply that does not answer the report with ``keeps`` gives no more than that."""
    stage = Stage(limit=3)
    lease(stage, "a", 2)
    stage.end(number=2)
    late = AccountReply(
        client_id="a", incarnation="first", account=ACCOUNT, epoch=stage.holder.epoch, version=900, answers=1,
        groups=(ReplyGroup(permits=3),),
    )  # fmt: skip
    stage.later(20_001)
    report = stage.run_pass()
    assert report is not None
    assert not report.groups
    stage.enqueue(quietly=True)
    stage.run_pass("a", late)
    assert stage.used() == 0


def test_that_rule_is_what_keeps_the_bound():
    """A7: without it, a late reply of a lease that was given back, and given to another since, goes over the limit."""

    def take_it_back() -> None:
        stage = Stage("a", "b", limit=2)
        lease(stage, "a", 2)
        stage.end("a", 2)
        stage.later(20_001)
        stage.run_pass("a")
        late = AccountReply(
            client_id="a", incarnation="first", account=ACCOUNT, epoch=stage.holder.epoch, version=900, answers=1,
            groups=(ReplyGroup(permits=2),),
        )  # fmt: skip
        stage.deliver()
        lease(stage, "b", 2)
        stage.enqueue("a", 2, quietly=True)
        stage.run_pass("a", late)

    take_it_back()
    with mutations.broken("ignore keeps"), pytest.raises(InvariantViolation, match="bound"):
        take_it_back()


def test_a_full_group_hides_no_other():
    """A10: with 10,000 waiting in a full group, an operation of another group is admitted in one round trip."""
    stage = Stage(limit=5)
    stage.decide(command(SetLimit, group="full", limit=1))
    stage.enqueue(number=10_000, group="full")
    stage.deliver()
    assert stage.used(group="full") == 1
    stage.enqueue(group="free")
    stage.deliver()
    assert stage.used(group="free") == 1
    assert stage.client().blocked["full"] == "group_limit"


def test_one_item_is_not_behind_a_backlog():
    """A11: a backlog of 10,000 in one client and one item in another both move in one allocation."""
    stage = Stage("a", "b", limit=2)
    stage.enqueue("a", 10_000)
    stage.enqueue("b")
    stage.deliver()
    assert stage.used("a") == 1
    assert stage.used("b") == 1


def test_at_limit_one_the_item_waits_a_turn():
    """A11: at limit 1 the one item waits a turn, not 10,000."""
    stage = Stage("a", "b", limit=1)
    stage.enqueue("a", 10_000)
    stage.deliver()
    stage.play(1_000, duration_ms=50)
    before = stage.left("a")
    stage.enqueue("b")
    stage.play(2_000, duration_ms=50)
    assert stage.left("b") == 0
    assert before - stage.left("a") < 41


@pytest.mark.parametrize("group", [None, ""])
def test_a_lowered_limit_revokes_nothing_and_converges(group):
    """A12: nothing is revoked, nothing new is given until usage fits, with nobody else waiting either."""
    stage = Stage(limit=5)
    lease(stage, "a", 5)
    stage.enqueue(number=20)
    stage.decide(command(SetLimit, group=group, limit=2))
    stage.deliver()
    assert stage.used() == 5
    for left in (4, 3, 2):
        stage.end()
        stage.deliver()
        assert stage.used() == left
    for _ in range(5):
        stage.end()
        stage.deliver()
        assert stage.used() == 2
    assert stage.footprint() == 2


@pytest.mark.parametrize("stop", [command(Pause), command(SetLimit, limit=0)])
@pytest.mark.parametrize("go", [command(Resume, 2), command(SetLimit, 2, limit=3)])
def test_stopping_admits_nothing_and_going_on_needs_no_enqueue(stop, go):
    """A13: limit 0 and Pause stop leases too; what runs goes on; then it continues without a new enqueue."""
    if isinstance(stop, Pause) != isinstance(go, Resume):
        return
    stage = Stage(limit=3)
    lease(stage, "a", 3)
    stage.enqueue(number=5)
    stage.decide(stop)
    stage.deliver()
    stage.end(number=2)
    stage.deliver()
    assert stage.used() == 1
    assert stage.client().blocked[""] == ("paused" if isinstance(stop, Pause) else "account_limit")
    stage.later(60_000)
    stage.decide(go)
    stage.deliver()
    assert stage.used() == 3
    assert stage.decision is not None


def test_silence_frees_nothing():
    """A14: a client cut off for an hour with running work: it is ordered to stop, and counted."""

    def an_hour() -> Stage:
        stage = Stage("a", "b", limit=2)
        lease(stage, "a", 2)
        stage.enqueue("b", 2)
        stage.deliver()
        for _ in range(360):
            stage.later(10_000)
            stage.decide()
            stage.replies.pop("a", None)
            stage.run_pass("b")
            stage.deliver() if not stage.reports.get("a") else None
            assert stage.footprint("a") == 2
            assert stage.used("b") == 0
        return stage

    an_hour()
    with mutations.broken("free on silence"), pytest.raises((AssertionError, InvariantViolation)):
        an_hour()


def test_a_lost_lease_is_found():
    """A15: the reply with the lease was lost; the client repeats its report and gets the present view."""
    stage = Stage(limit=2)
    stage.enqueue()
    stage.decide(stage.report())
    stage.reply()
    stage.later(1_000)
    stage.run_pass()
    stage.deliver()
    assert stage.used() == 1


def test_forfeit_frees_once():
    """A20: permits stay counted until forfeited; a second copy frees nothing of the client that came back."""
    stage = Stage("a", "b", limit=2)
    lease(stage, "a", 2)
    stage.enqueue("b")
    stage.deliver()
    stage.limit = None  # what runs on at a forfeited client is the operator's word against the bound
    order = command(Forfeit, client="a", epoch=stage.holder.epoch, version=stage.holder.version)
    decision = stage.decide(order)
    assert decision.mirror is not None
    assert stage.footprint("a") == 0
    told = stage.reply("a")
    stage.deliver()
    assert stage.used("b") == 1
    # It lives after all, and speaks before it has heard: all of it counts again.
    stage.later(300_000)
    report = stage.run_pass("a")
    assert report is not None
    stage.decide(stage.report("a"))
    assert stage.footprint("a") == 2
    stage.decide(order)
    stage.decide(order.model_copy(update={"client_id": "other"}))
    assert stage.footprint("a") in (0, 2)
    stage.run_pass("a", told)
    stage.deliver()
    assert stage.footprint("a") == 2
    stage.decide(order.model_copy(update={"client_id": "third"}))
    assert stage.footprint("a") == 2


def test_the_first_operation_costs_four_messages_in_its_life():
    """A21: one report and one reply admit it; two more give the lease back; then both rows are gone."""
    stage = Stage(limit=3)
    stage.enqueue()
    stage.deliver()
    assert stage.used() == 1
    assert stage.messages == 2
    stage.play(500, duration_ms=100)
    stage.play(30_000)
    assert stage.messages == 4
    assert stage.client().row is None
    assert stage.holder.row is None


@pytest.mark.parametrize("age_ms", [20_000, 3_600_000])
def test_old_copies_of_an_earlier_life_change_nothing(age_ms):
    """A21: copies of old reports and replies (20 s to an hour old) leave no phantom on either side."""
    stage = Stage(limit=3)
    stage.enqueue()
    report = stage.reports["a"]
    stage.decide(stage.report())
    reply = stage.reply()
    stage.run_pass("a", reply)
    stage.play(500, duration_ms=100)
    stage.play(30_000)
    assert stage.client().row is None
    stage.later(age_ms)
    stage.decide(report)
    stage.run_pass("a", reply)
    stage.deliver()
    stage.play(60_000)
    assert stage.client().row is None
    assert stage.holder.row is None
    assert stage.used() == 0


def test_a_dead_clients_demand_is_forgotten():
    """A32: a client that dies with 100 waiting loses its grants and its demand; the others go on."""

    def go_on() -> Stage:
        stage = Stage("a", "b")
        lease(stage, "a", 1)
        stage.enqueue("a", 12)
        stage.enqueue("b", 100)
        stage.deliver()
        stage.clients.pop("b")
        stage.later(6_000)
        for _ in range(60):
            stage.later(1_000)
            stage.end("a") if stage.used("a") else stage.run_pass("a")
            stage.decide(*[stage.report("a")] if stage.reports else [])
            if "a" in stage.replies:
                stage.run_pass("a", stage.reply("a"))
        assert stage.left("a") == 0
        return stage

    go_on()
    with mutations.broken("keep a dead client's demand"), pytest.raises(AssertionError):
        go_on()


def test_a_round_trip_longer_than_the_claim_window():
    """A33: with 11 s to and fro and a window of 10 s, operations are admitted all the same."""
    stage = Stage("a", "b")
    lease(stage, "a", 1)
    stage.enqueue("b")
    stage.deliver()
    stage.later(6_000)
    stage.end("a")
    stage.decide(stage.report("a"))
    grant = stage.reply("b")
    stage.later(5_500)
    stage.run_pass("b", grant)
    claim = stage.report("b")
    stage.later(5_500)
    stage.decide()
    stage.decide(claim)
    stage.run_pass("b", stage.reply("b"))
    assert stage.used("b") == 1


def test_a_lone_client_works_on_its_lease():
    """A34: with more waiting than its limit, a lone client sends no message an operation."""
    stage = Stage(limit=3)
    stage.enqueue(number=300)
    stage.deliver()
    before = stage.messages
    stage.play(20_000, duration_ms=100)
    assert stage.left() == 0
    assert stage.messages - before < 24


def test_what_lies_idle_while_another_waits_is_given_back():
    """A30: less than half of a lease is free, and the rest is in use for minutes: the other gets it in a second or so.

    Told at most once a second: releases of a lease that others wait for do not become a message each.
    """
    stage = Stage("a", "b", limit=10)
    lease(stage, "a", 6)
    lease(stage, "b", 4)
    stage.enqueue("b", 6)
    stage.deliver()
    stage.messages = 0
    for _ in range(2):
        stage.end("a")
    stage.play(1_500)
    assert (stage.used("a"), stage.used("b")) == (4, 6)
    assert stage.messages <= 10
    stage.end("a")
    stage.play(1_500)
    assert (stage.used("a"), stage.used("b")) == (3, 7)


@pytest.mark.parametrize("duration_ms", [20, 8_000, 60_000])
def test_two_hungry_clients_at_limit_one_share(duration_ms):
    """A34, A42: turns, also with operations longer than any freshness or turn; each gets about half."""
    stage = Stage("a", "b")
    stage.enqueue("a", 1_000)
    stage.enqueue("b", 1_000)
    stage.deliver()
    stage.play(max(20_000, 40 * duration_ms), duration_ms=duration_ms, step_ms=max(10, duration_ms // 50))
    done = {name: 1_000 - stage.left(name) for name in "ab"}
    assert sum(done.values()) >= 20
    assert abs(done["a"] - done["b"]) <= 0.2 * sum(done.values())


@pytest.mark.parametrize("newer_ack", [False, True])
def test_a_repeat_never_carries_a_newer_ack(newer_ack):
    """A39: a lowering, claims within the lease that it lowers, and a repeat of the lost report: never 5 in use.

    With counts taken before a reply was applied, but that reply's ack, the bound would be gone.
    """
    stage = Stage("a", "b", limit=5)
    lease(stage, "a", 4)
    stage.limit = 4
    stage.decide(command(SetLimit, limit=4))
    stage.end("a", 3, quietly=True)
    lost = stage.run_pass("a", stage.reply("a"))
    assert lost is not None
    assert (lost.groups[0].claimed, lost.groups[0].released) == (4, 3)
    stage.reports.pop("a")
    stage.enqueue("b", 4)
    stage.decide(stage.report("b"))
    lowering = read_reply(stage.reply("a"))
    assert lowering.groups[0].permits == 2
    stage.run_pass("b", stage.reply("b"))
    stage.enqueue("a", 3, quietly=True)
    stage.run_pass("a")
    assert stage.used("a") == 4
    stage.run_pass("a", lowering)
    newest = stage.report("a")
    stage.decide(lost.model_copy(update={"ack": lowering.ack}) if newer_ack else lost)
    if newer_ack:
        with pytest.raises(InvariantViolation, match="bound"):
            stage.deliver()
        return
    stage.deliver()
    assert stage.used("b") == 0
    stage.decide(newest)
    stage.deliver()
    stage.play(10_000, duration_ms=100)
    assert stage.left("a") == stage.left("b") == 0


@pytest.mark.parametrize("number", [1, 2])
def test_a_lost_lowering_or_turn_is_repeated_at_once(number):
    """A40: with the lease full, the other client starts within the repeat interval, not minutes later."""
    stage = Stage("a", "b", limit=number)
    stage.enqueue("a", 500)
    stage.deliver()
    stage.enqueue("b", 5)
    stage.decide(stage.report("b"))
    lost = read_reply(stage.reply("a"))
    assert lost.ack_wanted
    stage.run_pass("b", stage.reply("b"))
    stage.play(2_000, duration_ms=100)
    assert stage.left("b") < 5


def test_a_reply_for_an_account_whose_row_another_dispatcher_makes():
    """A41: one dispatcher answers a reply for an account without a row, another makes the row and claims."""
    stage = Stage("a", "b", limit=2)
    stage.enqueue("a")
    stage.decide(stage.report("a"))
    stale = stage.reply("a")
    stage.client("a").row = None  # the row was deleted meanwhile: its operation was cancelled
    stage.client("a").waiting.clear()
    stage.run_pass("a", stale)
    answer = stage.report("a")
    assert not reads(answer).groups
    stage.enqueue("a", 2)
    first = stage.report("a")
    lease(stage, "b", 2) if stage.footprint("a") == 0 else stage.enqueue("b", 2)
    stage.decide(first)
    stage.decide(answer)
    stage.run_pass("a", stale)
    stage.deliver()
    assert stage.used("a") + stage.used("b") <= 2
    stage.play(10_000, duration_ms=100)
    assert stage.left("a") == stage.left("b") == 0


def test_a_row_made_again_takes_nothing_from_its_earlier_life():
    """A43: a stale reply in the very pass that creates the row gives nothing."""
    stage = Stage("a", "b", limit=1)
    stage.enqueue("a")
    stage.decide(stage.report("a"))
    stale = stage.reply("a")
    stage.run_pass("a", stale)
    stage.play(30_000, duration_ms=100)
    assert stage.client("a").row is None
    lease(stage, "b", 1)
    stage.enqueue("a", quietly=True)
    report = stage.run_pass("a", stale)
    assert stage.used("a") == 0
    assert report is not None
    assert report.groups[0].keeps == 0


def test_a_restored_client_says_so_and_goes_on():
    """A19: a reply answers a seq above all that were drawn: permits are void, seq moves past it, work goes on."""
    stage = Stage(limit=2)
    lease(stage, "a", 1)
    backup = (stage.client().row, stage.client().seq)
    for _ in range(5):
        stage.enqueue(number=3)
        stage.deliver()
        stage.later(400_000)
        stage.run_pass()
        stage.deliver()
    seq = stage.client().seq
    assert seq > backup[1]
    stage.client().row, stage.client().seq = backup
    stage.client().invariants = Invariants()
    stage.client().running.clear()
    stage.client().waiting.clear()
    stage.enqueue(quietly=True)
    stage.later(400_000)
    stage.run_pass()
    stage.deliver()
    assert stage.client().seq > seq
    assert stage.used() == 1


def test_a_second_database_under_one_name_is_refused():
    """A35: refused loudly, nothing of the first is freed; once it is forfeited, its seq starts anew."""
    stage = Stage("a", "b", limit=2)
    lease(stage, "a", 2)
    stage.enqueue("b")
    report = reads(stage.report("b"))
    assert isinstance(report, AccountReport)
    copy = report.model_copy(update={"client_id": "a", "incarnation": "second"})
    decision = stage.decide(copy)
    assert len(decision.refusals) == 1
    assert "second" in decision.refusals[0].reason
    assert stage.footprint("a") == 2
    decision = stage.decide(command(Forfeit, client="a", epoch=MAX_INT, version=MAX_INT), copy)
    assert not decision.refusals
    assert [reply.incarnation for reply in decision.replies] == ["second"]
    assert stage.decide(report.model_copy(update={"client_id": "a", "seq": 99})).refusals


def test_an_acknowledgement_of_what_was_never_sent_begins_an_epoch_of_this_account():
    """Section 8: a holder that went back unnoticed gives nothing until all its clients have acknowledged."""
    stage = Stage("a", "b", limit=3)
    lease(stage, "a", 1)
    stage.enqueue("b")
    stage.deliver()
    old = stage.holder.row, stage.holder.version
    stage.enqueue("a", 2)
    stage.enqueue("b", 2)
    stage.deliver()
    epoch = stage.holder.state().epoch
    stage.holder.row, stage.holder.version = old
    stage.invariants = stage.holder.invariants = type(stage.invariants)()
    stage.later(300_000)
    stage.run_pass("a")
    decision = stage.decide(stage.report("a"))
    assert decision.state.epoch > epoch
    assert decision.warnings
    assert all(not reply.groups and reply.ack_wanted for reply in decision.replies)
    assert len(decision.replies) == 2
    stage.run_pass("a", stage.reply("a"))
    stage.decide(stage.report("a"))
    assert not read_reply(stage.replies["a"]).groups
    stage.play(60_000, duration_ms=500)
    assert stage.left("a") == stage.left("b") == 0
