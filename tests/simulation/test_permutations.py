"""Case B4: in whatever order messages come, how often, and with whichever missing, both sides end in the same state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from celery_durable.permits import queue
from celery_durable.permits.messages import AccountReply, AccountReport, Blocked, Declared, ReplyGroup, ReportGroup
from celery_durable.permits.queue import GroupCounts, QueueSettings
from holder_service import semaphore
from holder_service.footprint import footprint
from holder_service.semaphore import SemaphoreSettings
from tests.simulation.stage import ACCOUNT, Stage

NUMBER = 5
LIMIT = 3
orders = (
    st.lists(st.integers(0, NUMBER - 1), max_size=12).map(lambda some: [*some, NUMBER - 1]).flatmap(st.permutations)
)
"""Which messages come, in which order: any of them any number of times or never, and the newest at least once."""

REPORTS = [
    AccountReport(
        client_id="a",
        incarnation="first",
        account=ACCOUNT,
        seq=number + 1,
        groups=tuple(
            ReportGroup(group=name, claimed=0, waiting=waiting, keeps=0)
            for name, waiting in zip("xyz", counts, strict=True)
            if waiting
        ),
        declared=Declared(limit=2 + number),
    )
    for number, counts in enumerate([(1, 0, 2), (4, 4, 0), (0, 0, 7), (2, 9, 1), (3, 0, 5)])
]
REPLIES = [
    AccountReply(
        client_id="a",
        incarnation="first",
        account=ACCOUNT,
        epoch=epoch,
        version=version,
        answers=2,  # all that the client says: one that answers less gives nothing in a new epoch
        groups=tuple(
            ReplyGroup(group=name, permits=permits, claims=9 if name == "z" else None)
            for name, permits in zip("xyz", given, strict=True)
            if permits
        ),
        blocked=(Blocked(group="y", reason="group_limit"),) if number % 2 else (),
    )
    for number, (epoch, version, given) in enumerate(
        [(1, 3, (1, 0, 2)), (1, 8, (4, 0, 0)), (2, 1, (0, 3, 0)), (2, 2, (0, 0, 6)), (2, 5, (2, 1, 3))]
    )
]


@settings(deadline=None)
@given(order=orders)
@example(order=[4, 3, 2, 1, 0])
def test_reports_in_any_order_end_alike(order: Sequence[int]) -> None:
    """B4: the holder knows what the newest report said, as if no other had ever come."""

    def known(some: Sequence[int]) -> tuple[Any, ...]:
        state, version = semaphore.new_account(ACCOUNT, 1_000), 0
        for place in some:
            decision = semaphore.decide(state, [REPORTS[place]], 1_000, version + 1, SemaphoreSettings())
            state, version = decision.state, version + decision.changed
        client = state.clients["a"]
        pairs = {name: (pair.claimed, pair.used, pair.waiting) for name, pair in client.pairs.items() if pair.waiting}
        counted = sum(footprint(client, pair) for pair in client.pairs.values())
        assert counted <= semaphore.limit_in_force(state, SemaphoreSettings()).limit
        return client.seq, client.declared, dict(sorted(pairs.items()))

    assert known(order) == known([NUMBER - 1])


@settings(deadline=None)
@given(order=orders)
@example(order=[4, 3, 2, 1, 0])
def test_replies_in_any_order_end_alike(order: Sequence[int]) -> None:
    """B4: the client has what the newest reply gave, and waits for the newest reason, as if no other had ever come."""
    own = QueueSettings("a", "first")
    counts = {name: GroupCounts(waiting=1) for name in "xyz"}

    def given_by(some: Sequence[int]) -> tuple[Any, ...]:
        outcome = queue.finish(queue.plan(queue.new_account(ACCOUNT), counts, None, None, 0, own), {}, counts, 0, own)
        state = queue.seal(outcome, 1, own).state
        for place in some:
            # Nothing is admitted: what waits is locked by others each time.
            outcome = queue.finish(queue.plan(state, counts, REPLIES[place], None, 0, own), {}, counts, 0, own)
            state = queue.seal(outcome, 2, own).state if outcome.wants_seq else outcome.state
        groups = {name: (group.permits, group.claims, group.blocked) for name, group in state.groups.items()}
        return state.ack, groups

    assert given_by(order) == given_by([NUMBER - 1])


class Post:
    """Everything that was ever sent between the client and the holder, to be handed over at will."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.reports: list[bytes] = []
        self.replies: list[bytes] = []

    def collect(self) -> None:
        """Takes what is staged."""
        if "a" in self.stage.reports:
            self.reports.append(self.stage.report("a"))
        if "a" in self.stage.replies:
            self.replies.append(self.stage.reply("a"))

    def hand_over(self, to_holder: bool, age: int) -> None:
        """One message, the newest (0) or an older one, which may have come before."""
        sent = self.reports if to_holder else self.replies
        if age < len(sent):
            body = sent[-1 - age]
            self.stage.decide(body) if to_holder else self.stage.run_pass("a", body)
            self.collect()


actions = st.lists(
    st.one_of(
        st.tuples(st.just("enqueue"), st.integers(1, 3)),
        st.tuples(st.just("end"), st.integers(1, 2)),
        st.tuples(st.just("to holder"), st.integers(0, 4)),
        st.tuples(st.just("to client"), st.integers(0, 4)),
        st.tuples(st.just("later"), st.sampled_from([200, 1_000, 6_000, 21_000])),
    ),
    min_size=5,
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(script=actions)
def test_a_conversation_with_gaps_and_repetitions_ends_where_a_perfect_one_does(
    script: Sequence[tuple[str, int]],
) -> None:
    """B4: over a post that loses, repeats and shuffles, and over one that delivers all at once."""

    def end_state(perfect: bool) -> None:
        stage = Stage("a", limit=LIMIT)
        post = Post(stage)
        left = 0
        for what, number in script:
            if what == "enqueue":
                stage.enqueue("a", number)
                left += number
            elif what == "end" and stage.used("a") >= number:
                stage.end("a", number)
                left -= number
            elif what == "later":
                stage.later(number)
                stage.run_pass("a")
                stage.decide()
            elif what in ("to holder", "to client") and not perfect:
                post.hand_over(what == "to holder", number)
            if perfect:
                stage.deliver()
            post.collect()
        # From here on the post is perfect, and nothing ends: all that may be in use is, and no more is counted.
        stage.play(60_000, step_ms=1_000)
        running = min(LIMIT, left)
        assert (stage.used("a"), stage.left("a"), stage.footprint("a")) == (running, left - running, running)

    end_state(perfect=False)
    end_state(perfect=True)
