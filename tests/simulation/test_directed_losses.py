"""Directed schedules about what dies, is lost and comes back: each message moved by hand, every other order tried."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import permutations

import pytest

from celery_durable.permits.messages import AccountReply, AccountReport, Command, Forfeit, read_reply
from celery_durable.permits.queue import AccountState
from holder_service import usage
from holder_service.semaphore import Decision
from tests.invariants import Invariants
from tests.simulation.stage import ACCOUNT, Stage
from tests.simulation.world import reads

TWENTY_SECONDS_MS, AN_HOUR_MS = 20_000, 3_600_000


class Cut(Stage):
    """A stage on which nothing reaches some clients, and nothing comes from them."""

    def __init__(self, *names: str, limit: int) -> None:
        self.cut: set[str] = set()
        super().__init__(*names, limit=limit)

    def run_pass(self, name: str = "a", reply: bytes | AccountReply | None = None) -> AccountReport | None:
        report = super().run_pass(name, reply)
        if name in self.cut:
            self.reports.pop(name, None)
        return report

    def decide(self, *messages: bytes | AccountReport | Command) -> Decision:
        decision = super().decide(*messages)
        for name in self.cut:
            self.replies.pop(name, None)
        return decision


def report_in(body: bytes) -> AccountReport:
    """The report that these bytes are."""
    message = reads(body)
    assert isinstance(message, AccountReport)
    return message


def holding(stage: Stage, name: str, number: int) -> None:
    """The client has so many operations in use on a lease."""
    stage.enqueue(name, number)
    stage.deliver()
    assert stage.used(name) == number


def quiet(stage: Stage, *names: str) -> None:
    """Nothing waits, is in use, is counted or has a row any more."""
    stage.play(120_000, duration_ms=100, step_ms=500)
    for name in names:
        assert (stage.left(name), stage.used(name), stage.client(name).row) == (0, 0, None)
    assert stage.holder.row is None


def test_a_copied_database_costs_no_other_client_anything() -> None:
    """Two databases of one identity: what they have in use may be counted no more, and is once the copy is gone."""
    stage = Stage("a", "b", limit=3)
    holding(stage, "a", 2)
    stage.limit = None  # nothing is promised of what these two have together with the others
    copy = stage.clients["copy"] = deepcopy(stage.client("a"))
    copy.invariants = Invariants()
    stage.end("copy", 2, quietly=True)
    stage.later(TWENTY_SECONDS_MS)
    stage.run_pass("copy")
    stage.decide(stage.report("copy"))
    assert stage.footprint("a") < stage.used("a"), "the holder took the copy for the service"
    del stage.clients["copy"]
    stage.enqueue("b", 5)
    stage.decide(stage.report("b"))
    stage.run_pass("b", stage.reply("b"))
    assert 0 < stage.used("b") <= stage.footprint("b") <= 3

    stage.deliver()  # what the holder answered the copy reaches the service
    assert stage.client("a").seq > copy.seq
    assert stage.used("a") == stage.footprint("a") == 2
    quiet(stage, "a", "b")


# A8


@pytest.mark.parametrize("died", ["before the report was read", "after it was read", "with the reply in its hands"])
def test_a_crash_between_report_and_reply_loses_nothing(died: str) -> None:
    """A8: the row has all that the next process needs: it says the same again, and is told what is so now."""
    stage = Stage("a", "b", limit=3)
    stage.enqueue("a", 2)
    first = stage.report("a")
    if died != "before the report was read":
        stage.decide(first)
        stage.reply("a")
    row = stage.client("a").row
    assert row is not None
    assert AccountState.from_json(row).report is not None
    # The next process of the client knows its rows and nothing else; the report is due again after a second.
    stage.later(999)
    assert stage.run_pass("a") is None
    stage.later(1)
    assert stage.run_pass("a") is not None
    assert stage.reports["a"] == first, "byte for byte"
    decision = stage.decide(stage.report("a"))
    (reply,) = [reply for reply in decision.replies if reply.client_id == "a"]
    assert reply.answers == report_in(first).seq
    assert decision.changed is (died == "before the report was read")
    stage.deliver()
    assert stage.used("a") == 2
    holding(stage, "b", 1)
    quiet(stage, "a", "b")


def test_a_holder_that_died_after_its_commit_asks_again_for_what_it_has_to_know() -> None:
    """A8: the reply that lowers a lease was never sent: its timer says it again, and the other client has its turn."""
    stage = Stage("a", "b", limit=1)
    holding(stage, "a", 1)
    stage.enqueue("a", 3)
    stage.enqueue("b")
    stage.decide(stage.report("b"))
    lost = read_reply(stage.reply("a"))
    assert lost.ack_wanted
    stage.reply("b")
    due_ms = stage.holder.due_at_ms
    assert due_ms is not None
    assert due_ms - stage.now_ms == 1_000
    stage.later(1_000)
    stage.decide()
    again = read_reply(stage.replies["a"])
    assert (again.version, again.groups, again.ack_wanted) == (lost.version, lost.groups, True)
    stage.play(5_000, duration_ms=100)
    assert stage.left("b") == 0


# A15


def test_a_last_release_that_the_topic_lost_is_said_until_it_is_answered() -> None:
    """A15: the report that gave everything back is gone with the topic; it comes again, and both rows go after it."""
    stage = Stage("a", "b", limit=2)
    holding(stage, "a", 2)
    stage.enqueue("b", 2)
    stage.deliver()
    stage.end("a", 2)
    stage.later(20_001)
    stage.run_pass("a")
    last = stage.report("a")
    stage.reports.clear()
    stage.replies.clear()
    assert all(group.claimed == group.released for group in report_in(last).groups)
    assert stage.client("a").row is not None, "it stays for as long as nobody has answered"
    assert stage.footprint("a") == 2
    stage.later(1_000)
    stage.run_pass("a")
    assert stage.reports["a"] == last
    stage.deliver()
    assert stage.used("b") == 2
    quiet(stage, "a", "b")


def test_a_lease_that_nobody_remembers_asking_for_is_given_back() -> None:
    """A15: its operation was cancelled and the row is gone when the lost lease is said again: answered with nothing."""
    stage = Stage("a", "b", limit=1)
    stage.enqueue("a")
    stage.decide(stage.report("a"))
    stage.reply("a")
    stage.client("a").waiting.clear()
    stage.client("a").row = None
    stage.enqueue("b")
    stage.decide(stage.report("b"))
    stage.run_pass("b", stage.reply("b"))
    assert (stage.used("b"), stage.footprint("a")) == (0, 1), "it is counted for the client that may have it"
    stage.reply("a")
    stage.play(5_000)
    assert stage.used("b") == 1
    assert stage.footprint("a") == 0


# A20


def gone(stage: Cut) -> Forfeit:
    """Client a has both permits and is cut off for an hour. Returns the operator's word against it."""
    holding(stage, "a", 2)
    stage.cut.add("a")
    stage.enqueue("b", 2)
    stage.play(AN_HOUR_MS, step_ms=20_000)
    return Forfeit(
        client_id="ops",
        account=ACCOUNT,
        seq=1,
        client="a",
        epoch=stage.holder.epoch,
        version=stage.holder.version,
        by="kim",
        why="its cluster was switched off",
    )


def test_a_service_that_is_gone_is_counted_until_somebody_says_so() -> None:
    """A20: for an hour, and it can be seen; the forfeit frees it at once."""
    stage = Cut("a", "b", limit=2)
    order = gone(stage)
    assert (stage.footprint("a"), stage.used("b")) == (2, 0)
    seen = usage.of(stage.holder.state(), stage.now_ms, stage.holder.settings)
    assert [client.last_report_ms for client in seen.clients if client.client_id == "a"] >= [AN_HOUR_MS]
    stage.limit = None  # what still runs at the forfeited client is the operator's word against the bound
    stage.decide(order)
    assert stage.footprint("a") == 0
    stage.play(2_000)
    assert stage.used("b") == 2


@pytest.mark.parametrize("sender", ["ops", "another"])
def test_a_second_copy_of_a_forfeit_frees_nothing_of_who_came_back(sender: str) -> None:
    """A20: the same message again, or another's same words: what they free ends at the version that they name."""
    stage = Cut("a", "b", limit=2)
    order = gone(stage)
    copy = order if sender == "ops" else order.model_copy(update={"client_id": sender})
    stage.limit = None
    stage.decide(order)
    stage.play(2_000)
    assert stage.used("b") == 2
    # It lives after all: it speaks, is told to stop, and says that it did. What it has in use counts again.
    stage.cut.clear()
    stage.later(1_000)
    stage.run_pass("a")
    stage.deliver()
    assert (stage.used("a"), stage.footprint("a")) == (2, 2)
    stage.decide(copy)
    stage.deliver()
    assert stage.footprint("a") == 2
    # And what it is given from now on counts too, whatever is said of its earlier life.
    stage.end("a", 2)
    stage.end("b", 2)
    stage.deliver()
    stage.limit = 2
    stage.enqueue("a", 2)
    stage.deliver()
    assert stage.used("a") == 2
    stage.decide(copy)
    stage.deliver()
    assert stage.footprint("a") == 2
    stage.enqueue("b", 2)
    stage.deliver()
    assert stage.used("b") == 0
    quiet(stage, "a", "b")


# A21


def an_earlier_life(stage: Stage) -> tuple[list[bytes], list[bytes]]:
    """All reports and replies of client a from its first operation to the rows' end."""
    reports: list[bytes] = []
    replies: list[bytes] = []

    def pump() -> None:
        while stage.reports or stage.replies:
            for name in list(stage.reports):
                body = stage.report(name)
                reports.append(body)
                stage.decide(body)
            for name in list(stage.replies):
                body = stage.reply(name)
                replies.append(body)
                stage.run_pass(name, body)

    stage.enqueue("a", 4)
    pump()
    for _ in range(4):
        stage.later(100)
        stage.end("a")
        pump()
    for _ in range(TWENTY_SECONDS_MS // 1_000 + 1):
        stage.later(1_000)
        stage.run_pass("a")
        stage.decide()
        pump()
    assert (stage.client("a").row, stage.holder.row) == (None, None)
    assert len(reports) >= 2
    assert len(replies) >= 2
    return reports, replies


@pytest.mark.parametrize("age_ms", [TWENTY_SECONDS_MS, AN_HOUR_MS])
@pytest.mark.parametrize("lives", ["neither", "other", "again"])
def test_old_copies_are_nothing_in_any_order(age_ms: int, lives: str) -> None:
    """A21: every old report and reply once more, in every order, with the account idle, used by another, or back.

    The bound is checked at each claim; in the end neither side keeps a phantom.
    """
    for number, order in enumerate(permutations(range(4))):
        stage = Stage("a", "b", limit=2)
        reports, replies = an_earlier_life(stage)
        stage.later(age_ms - TWENTY_SECONDS_MS)
        copies: list[Callable[[], object]] = [partial(stage.decide, body) for body in reports[:2]]
        copies += [partial(stage.run_pass, "a", body) for body in (replies[0], replies[-1])]
        if lives == "other":
            holding(stage, "b", 2)
        if lives == "again":
            stage.enqueue("b", 1)
            stage.enqueue("a", 2, quietly=number % 2 == 0)
        for place in order:
            copies[place]()
            if lives != "neither":
                stage.deliver()
        if lives != "again":
            assert (stage.used("a"), stage.used("b")) == (0, 2 if lives == "other" else 0)
        stage.enqueue("b", 2)
        quiet(stage, "a", "b")


# A41


ANSWERS, MAKES, READS_ANSWER, READS_REPORT = "answers", "makes", "reads the answer", "reads the report"


@pytest.mark.parametrize("other", ["holds all", "waits"])
def test_a_reply_without_a_row_in_every_order(other: str) -> None:
    """A41: one dispatcher answers a stale reply while another makes the row and claims; the reports may swap places."""
    tried = 0
    for order in permutations([ANSWERS, MAKES, READS_ANSWER, READS_REPORT]):
        stage = Stage("a", "b", limit=2)
        stage.enqueue("a", 2)
        stage.decide(stage.report("a"))
        stale = stage.reply("a")
        assert read_reply(stale).groups[0].permits == 2
        # Both were cancelled, the lease given back and given to the other; the reply was still on its way.
        stage.client("a").waiting.clear()
        stage.run_pass("a", stale)
        stage.play(60_000, step_ms=500)
        assert stage.client("a").row is None
        if other == "holds all":
            holding(stage, "b", 2)
        else:
            stage.enqueue("b", 2, quietly=True)
        said: dict[str, bytes] = {}
        for step in order:
            if step == ANSWERS:
                stage.run_pass("a", stale)
                said.update({READS_ANSWER: stage.report("a")} if "a" in stage.reports else {})
            elif step == MAKES:
                stage.enqueue("a", 2)
                said.update({READS_REPORT: stage.report("a")} if "a" in stage.reports else {})
            elif step in said:
                stage.decide(said[step])
            assert stage.used("a") == 0, "a stale reply lets nothing in, whoever reads it"
        tried += 1
        for body in said.values():
            stage.decide(body)
        stage.run_pass("b")
        stage.deliver()
        assert stage.used("a") + stage.used("b") <= 2
        quiet(stage, "a", "b")
    assert tried == 24
