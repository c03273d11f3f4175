"""The client's rules, one by one (design, sections 7 and 8)."""

import pytest

from celery_durable.permits import queue
from celery_durable.permits.messages import (
    AccountLimit,
    AccountReply,
    Blocked,
    Declared,
    Rate,
    ReplyGroup,
    read_account_message,
)
from celery_durable.permits.queue import AccountState, GroupCounts, QueueSettings
from tests.invariants import Invariants

SETTINGS = QueueSettings("c", "i")


class Client:
    """A row, a clock and the counts.

    Each pass claims within what was given, and what it reports and acknowledges only grows.
    """

    def __init__(self) -> None:
        self.state = queue.new_account("acc")
        self.now_ms = 1_000
        self.seq = 10
        self.counts: dict[str, GroupCounts] = {}
        self.version = 0
        self.invariants = Invariants()

    def run(self, reply=None, declared=None, later_ms=0):
        self.now_ms += later_ms
        plan = queue.plan(self.state, self.counts, reply, declared, self.now_ms, SETTINGS, seq_newest=self.seq)
        self.admitted = dict(plan.admit)
        if plan.restored is not None:
            self.seq = plan.restored
        outcome = queue.finish(plan, plan.admit, self.counts, self.now_ms, SETTINGS)
        if outcome.wants_seq:
            self.seq += 1
            outcome = queue.seal(outcome, self.seq, SETTINGS)
        for group, number in plan.admit.items():
            count = self.counts[group]
            self.counts[group] = GroupCounts(count.in_use + number, count.waiting - number)
            if number:
                given = plan.state.groups[group]
                self.invariants.claim(
                    ("c", group),
                    in_use=self.counts[group].in_use,
                    permits=given.permits,
                    claimed=outcome.state.groups[group].claimed,
                    claims=given.claims,
                )
        if outcome.ack is not None:
            self.invariants.grows("ack", "c", (outcome.ack.epoch, outcome.ack.version))
        if outcome.report is not None:
            self.invariants.grows("seq", "c", (outcome.report.seq,))
        self.state = outcome.state
        assert AccountState.from_json(self.state.to_json()) == self.state
        return outcome

    def reply(self, *groups, **values):
        self.version += 1
        known = {
            "client_id": "c",
            "incarnation": "i",
            "account": "acc",
            "epoch": 5,
            "version": self.version,
            "answers": self.seq,
        }
        return AccountReply(
            groups=groups, **known | {"account_limit": AccountLimit(limit=9, in_use=0, source="x")} | values
        )

    def leased(self, permits, in_use=0, **values):
        self.counts = {"": GroupCounts(0, max(1, in_use))}
        self.run()
        self.run(self.reply(ReplyGroup(permits=permits, **values)))
        self.counts = {"": GroupCounts(in_use, 0)}


def test_a_reply_of_a_new_epoch_that_does_not_answer_the_newest_report_gives_nothing():
    """A holder without memory may have met an old report first, and still meet one that keeps less (seed 101297)."""
    client = Client()
    client.counts = {"": GroupCounts(0, 2)}
    client.run()
    client.run(client.reply())
    report = client.run(client.reply(ReplyGroup(permits=2), epoch=6, answers=client.seq - 1)).report
    assert client.admitted == {}
    assert (report.seq, report.ack.epoch, report.groups[0].keeps) == (12, 6, 0)
    client.run(client.reply(ReplyGroup(permits=2), epoch=6, answers=11))
    assert client.admitted == {}
    client.run(client.reply(ReplyGroup(permits=2), epoch=6, answers=12))
    assert client.admitted == {"": 2}


def test_what_was_in_use_before_a_new_epoch_is_no_reason_to_claim_again():
    client = Client()
    client.leased(1, in_use=1)
    report = client.run(client.reply(ReplyGroup(permits=1), epoch=6, answers=client.seq - 1)).report
    assert (report.groups[0].claimed, report.groups[0].released, report.groups[0].keeps) == (1, 0, 0)
    client.counts = {"": GroupCounts(0, 1)}
    client.run()
    assert client.admitted == {}


def test_a_new_row_reports_that_it_keeps_nothing():
    client = Client()
    client.counts = {"g": GroupCounts(0, 3, 70)}
    report = client.run(declared=Declared(limit=4)).report
    assert report.groups[0].model_dump() == {
        "group": "g", "claimed": 0, "released": 0, "waiting": 3, "oldest_wait_ms": 70, "keeps": 0,
    }  # fmt: skip
    assert (report.seq, report.ack, report.declared) == (11, None, Declared(limit=4))


def test_an_unanswered_report_is_repeated_byte_for_byte_and_backs_off():
    client = Client()
    client.counts = {"": GroupCounts(0, 3)}
    first = client.run().report.to_bytes()
    delays = []
    for _ in range(8):
        before = client.now_ms
        outcome = client.run(later_ms=client.run().due_at_ms - client.now_ms)
        delays.append(client.now_ms - before)
        client.counts = {"": GroupCounts(0, 3 - len(delays) % 2)}
        assert outcome.report.to_bytes() == first
    assert delays == [1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000, 30_000]


def test_an_applied_reply_without_a_wish_for_an_answer_sends_nothing():
    client = Client()
    client.leased(3, in_use=1)
    assert client.run().report is None
    assert client.state.ack == (5, 1)


def test_a_reply_is_applied_once_and_only_if_it_is_newer():
    client = Client()
    client.leased(3)
    older = client.reply(ReplyGroup(permits=8), version=1)
    client.counts = {"": GroupCounts(0, 9)}
    client.run(older)
    assert client.admitted == {"": 3}
    client.run(client.reply(ReplyGroup(permits=5), epoch=4, version=99))
    assert client.admitted == {}
    client.invariants.require("level", "ack", "seq")


@pytest.mark.parametrize("change", [{"client_id": "x"}, {"incarnation": "x"}, {"account": "x"}])
def test_a_reply_for_somebody_else_is_ignored(change):
    client = Client()
    client.counts = {"": GroupCounts(0, 1)}
    client.run()
    client.run(client.reply(ReplyGroup(permits=1), **change))
    assert client.admitted == {}
    assert client.state.ack is None


def test_a_reply_asks_for_an_acknowledgement_with_present_counts():
    client = Client()
    client.leased(3, in_use=2)
    report = client.run(client.reply(ReplyGroup(permits=1), ack_wanted=True)).report
    assert report.ack.version == 2
    assert (report.groups[0].claimed - report.groups[0].released, report.groups[0].keeps) == (2, None)


def test_a_reply_that_brings_nothing_new_is_answered_at_most_once_a_second():
    client = Client()
    client.leased(3, in_use=2)
    wish = client.reply(ReplyGroup(permits=3), ack_wanted=True)
    first = client.run(wish).report
    sent = [client.run(wish, later_ms=100).report for _ in range(20)]
    assert [report for report in sent if report is not None] == [first] * 2


def test_a_reply_for_an_account_without_a_row_is_answered_if_it_gives_something():
    client = Client()
    outcome = client.run(client.reply(ReplyGroup(permits=1)))
    assert outcome.report is not None
    assert outcome.report.groups == ()
    assert outcome.report.ack.version == 1
    assert client.run(client.reply()).delete
    client.state = queue.new_account("acc")
    assert client.run(client.reply()).delete


def test_the_end_of_a_turn_gives_back_what_is_free_and_claims_no_more():
    client = Client()
    client.leased(3, in_use=1, turn_ms=200)
    assert client.run(later_ms=100).report is None
    assert client.run().due_at_ms == 1_200
    report = client.run(later_ms=100).report
    assert report.groups[0].keeps == 1
    client.counts = {"": GroupCounts(0, 5)}
    outcome = client.run(later_ms=1)
    assert client.admitted == {}
    assert outcome.report.groups[0].keeps == 0
    assert outcome.blocked == {"": "turn"}


def test_an_idle_lease_goes_back_after_20_seconds():
    client = Client()
    client.leased(3, in_use=1)
    assert client.run(later_ms=19_999).report is None
    report = client.run(later_ms=1).report
    assert report.groups[0].keeps == 1
    client.counts = {}
    report = client.run(later_ms=60_000).report
    assert report.groups == ()
    assert client.run(client.reply()).delete


def test_keeps_is_said_until_the_newest_report_that_said_so_is_answered():
    client = Client()
    client.leased(4, in_use=2)
    client.run(later_ms=20_000)
    said = client.seq
    client.counts = {"": GroupCounts(2, 3)}
    assert client.run().report.groups[0].keeps == 2
    client.run(client.reply(ReplyGroup(permits=4), answers=said))
    assert client.admitted == {}
    client.counts = {"": GroupCounts(2, 6)}
    client.run(client.reply(ReplyGroup(permits=4)))
    assert client.admitted == {"": 2}


def test_an_older_reply_lifts_no_keeps():
    """A reply of an earlier epoch that answers the report says nothing of what the present holder knows."""
    client = Client()
    client.leased(4, in_use=2)
    client.run(later_ms=20_000)
    seq = client.seq
    client.run(client.reply(ReplyGroup(permits=2), epoch=6, answers=seq - 1))
    client.run(client.reply(ReplyGroup(permits=4), epoch=5, answers=seq))
    client.counts = {"": GroupCounts(2, 6)}
    client.run(client.reply(ReplyGroup(permits=4), epoch=6, answers=seq - 1))
    assert client.admitted == {}


def test_a_group_that_the_last_report_did_not_list_gets_nothing_from_an_older_reply():
    client = Client()
    client.leased(1, in_use=1)
    client.counts = {"": GroupCounts(1, 0), "new": GroupCounts(0, 1)}
    client.run(client.reply(ReplyGroup(permits=1), ReplyGroup(group="new", permits=2), answers=client.seq - 1))
    assert client.admitted == {}
    client.run(client.reply(ReplyGroup(permits=1), ReplyGroup(group="new", permits=2)))
    assert client.admitted == {"new": 1}


def test_lease_holders_report_at_half_of_the_lifetime_and_everyone_daily():
    client = Client()
    client.leased(2, in_use=2)
    assert client.run().due_at_ms == 1_000 + 300_000
    seq = client.seq
    assert client.run(later_ms=300_000).report.seq == seq + 1


def test_what_waits_with_no_permit_is_repeated_up_to_every_ten_minutes():
    client = Client()
    client.counts = {"": GroupCounts(0, 1)}
    client.run()
    client.run(client.reply())
    pauses = []
    for _ in range(14):
        due_ms = client.run().due_at_ms
        pauses.append(due_ms - client.now_ms)
        assert client.run(later_ms=due_ms - client.now_ms).report is not None
    assert pauses[0] == 1_000
    assert pauses[-1] == 600_000


def test_demand_is_told_where_it_may_be_met():
    client = Client()
    client.leased(2, in_use=2)
    client.counts = {"": GroupCounts(2, 1)}
    assert client.run().report.groups[0].waiting == 1
    client.run(client.reply(ReplyGroup(permits=2)))
    client.counts = {"": GroupCounts(2, 2)}
    assert client.run().report is not None
    client.run(client.reply(ReplyGroup(permits=2), account_limit=AccountLimit(limit=4, in_use=4, source="x")))
    client.counts = {"": GroupCounts(2, 20)}
    assert client.run().report is None
    client.counts = {"": GroupCounts(2, 0)}
    assert client.run().report is not None


def test_less_demand_is_told_where_others_wait_for_it():
    client = Client()
    client.leased(4, in_use=4)
    client.run(client.reply(ReplyGroup(permits=4), ack_wanted=True))
    client.counts = {"": GroupCounts(2, 0)}
    assert client.run().report is None
    blocked = (Blocked(reason="account_limit"),)
    assert client.run(client.reply(ReplyGroup(permits=4), blocked=blocked)).report is not None


def test_of_the_groups_that_only_wait_200_are_listed_in_rotation():
    """A38: bounded reports, oldest first; all groups have their turn."""
    client = Client()
    client.counts = {f"g{number}": GroupCounts(0, 1, number) for number in range(1_000)}
    report = client.run().report
    assert len(report.groups) == 200
    assert {group.group for group in report.groups} == {f"g{number}" for number in range(800, 1_000)}
    assert len(report.to_bytes()) < 25_000
    assert len(client.state.to_json()) < 12_000
    seen = {group.group for group in report.groups}
    for _ in range(4):
        assert client.run(client.reply()).report is None
        report = client.run(later_ms=1_000).report
        seen |= {group.group for group in report.groups}
    assert len(seen) == 1_000


def test_groups_in_use_are_always_listed():
    client = Client()
    client.counts = {f"g{number}": GroupCounts(0, 1, number) for number in range(1_000)}
    client.run()
    client.counts["g0"] = GroupCounts(1, 1)
    report = client.run(declared=Declared(limit=3)).report
    assert report.groups[0].group == "g0"
    assert len(report.groups) == 201


def test_the_declarations_of_all_tasks_are_merged_and_told():
    client = Client()
    client.counts = {"": GroupCounts(0, 1)}
    client.run(declared=Declared(limit=4))
    assert client.run(declared=Declared(limit=4)).report is None
    assert client.run(declared=Declared(limit=2)).report.declared == Declared(limit=2)
    assert client.run(declared=Declared(limit=9)).report is None


def test_a_restored_database_voids_its_permits_and_reports_even_nothing():
    """A19."""
    client = Client()
    client.leased(3, in_use=1)
    outcome = client.run(client.reply(ReplyGroup(permits=3), answers=500))
    assert outcome.report.seq == 501
    assert outcome.report.groups[0].keeps == 0
    client.state = queue.restored_account(client.state)
    client.counts = {}
    outcome = client.run()
    assert outcome.report.groups == ()
    assert not outcome.delete


def test_why_it_waits():
    """G1."""
    client = Client()
    client.counts = {"": GroupCounts(0, 1), "g": GroupCounts(0, 1)}
    assert client.run().blocked == {}
    assert client.run(later_ms=5_000).blocked == {"": "holder_silent", "g": "holder_silent"}
    reply = client.reply(blocked=(Blocked(group="g", reason="paused"),))
    assert client.run(reply).blocked == {"": "account_limit", "g": "paused"}


def test_releases_never_go_back():
    client = Client()
    client.leased(5, in_use=2)
    client.counts = {"": GroupCounts(1, 0)}
    client.run(client.reply(ReplyGroup(permits=5), ack_wanted=True))
    client.counts = {"": GroupCounts(4, 0)}
    group = client.run(client.reply(ReplyGroup(permits=5), ack_wanted=True)).report.groups[0]
    assert group.claimed - group.released == 4
    assert group.released >= 1


def test_the_row_is_small_and_reports_are_readable():
    client = Client()
    client.leased(3, in_use=3)
    client.run(declared=Declared(limit=3, rate=Rate(tokens=1, per_ms=5, burst=2)))
    assert len(client.state.to_json()) < 220
    report = client.run(client.reply(ack_wanted=True)).report
    assert read_account_message(report.to_bytes()) == report
