"""Hypothesis drives both cores step by step, and shrinks what goes wrong to a short schedule."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from celery_durable.permits.messages import Declared, Pause, Resume, SetLimit
from tests.simulation.stage import ACCOUNT, Stage

NAMES = st.sampled_from(["a", "b"])
GROUPS = st.sampled_from(["", "g"])


class BothCores(RuleBasedStateMachine):
    """Messages are kept for ever: any may arrive at any time, once, twice or never."""

    @initialize(limit=st.integers(1, 4), group_limit=st.none() | st.integers(1, 2))
    def begin(self, limit, group_limit):
        self.stage = Stage("a", "b", limit=limit, group_limit=group_limit)
        self.stage.limit = None
        for client in self.stage.clients.values():
            client.declared = Declared(limit=limit, group_limit=group_limit)
        self.limit = limit
        self.group_limit = group_limit
        self.sent = []
        self.answers = []
        self.seq = 0

    def collect(self):
        self.sent += self.stage.reports.values()
        self.answers += self.stage.replies.items()
        self.stage.reports.clear()
        self.stage.replies.clear()

    @rule(name=NAMES, group=GROUPS, number=st.integers(1, 4))
    def enqueue(self, name, group, number):
        self.stage.enqueue(name, number, group)
        self.collect()

    @rule(name=NAMES, group=GROUPS, number=st.integers(1, 3))
    def end(self, name, group, number):
        self.stage.end(name, number, group)
        self.collect()

    @rule(name=NAMES)
    def cancel(self, name):
        self.stage.client(name).waiting.clear()
        self.stage.run_pass(name)
        self.collect()

    @rule(ms=st.sampled_from([10, 200, 1_000, 5_001, 10_000, 20_000, 300_000, 600_000]))
    def time_passes(self, ms):
        self.stage.later(ms)
        self.stage.decide()
        for name in self.stage.clients:
            self.stage.run_pass(name)
        self.collect()

    @rule(data=st.data())
    def a_report_arrives(self, data):
        if self.sent:
            newest = st.just(self.sent[-1]) | st.sampled_from(self.sent)
            self.stage.decide(data.draw(newest, label="report"))
            self.collect()

    @rule(data=st.data())
    def a_reply_arrives(self, data):
        if self.answers:
            newest = st.just(self.answers[-1]) | st.sampled_from(self.answers)
            name, reply = data.draw(newest, label="reply")
            self.stage.run_pass(name, reply)
            self.collect()

    @rule()
    def all_is_delivered(self):
        for body in self.sent[-2:]:
            self.stage.decide(body)
        self.collect()
        for name, reply in self.answers[-2:]:
            self.stage.run_pass(name, reply)
        self.collect()

    @rule(paused=st.booleans())
    def pause(self, paused):
        self.seq += 1
        kind = Pause if paused else Resume
        self.stage.decide(kind(client_id="ops", account=ACCOUNT, seq=self.seq))
        self.collect()

    @rule(limit=st.integers(0, 4))
    def lower(self, limit):
        """Only ever below what is declared, so that the bound stays one number."""
        self.seq += 1
        limit = min(limit, self.limit)
        self.stage.decide(SetLimit(client_id="ops", account=ACCOUNT, seq=self.seq, limit=limit))
        self.collect()

    @rule()
    def the_database_is_lost(self):
        """Of each client the newest report is in the topic; the rebuild reads all that ever was."""
        self.stage.holder.lose_database(max(self.stage.now_ms, self.stage.holder.epoch + 1))
        for body in self.sent:
            self.stage.decide(body)
        self.stage.holder.rebuilding = False
        self.collect()

    @invariant()
    def the_bound_holds(self):
        if not hasattr(self, "stage"):
            return
        limits = {} if self.group_limit is None else {"g": self.group_limit}
        self.stage.invariants.bound(self.stage.in_use(), self.limit, limits)
        if not self.stage.holder.state().waits_for_epoch:
            self.stage.invariants.covers(self.stage.holder.footprints(), self.stage.in_use())

    def teardown(self):
        """Once nothing is lost any more, all that waits runs."""
        if not hasattr(self, "stage"):
            return
        stage = self.stage
        self.seq += 1
        stage.decide(
            Resume(client_id="ops", account=ACCOUNT, seq=self.seq),
            SetLimit(client_id="ops", account=ACCOUNT, seq=self.seq, limit=self.limit),
        )
        for name in stage.clients:
            stage.run_pass(name)
        stage.deliver()
        stage.play(1_300_000, duration_ms=500, step_ms=1_000)
        waiting = sum(len(rows) for client in stage.clients.values() for rows in client.waiting.values())
        rows = [name for name, client in stage.clients.items() if client.row is not None]
        rows += [] if stage.holder.row is None else ["holder"]
        footprint = sum(stage.holder.footprints().values())
        stage.invariants.quiet(footprint, sum(stage.in_use().values()), waiting, rows)


TestBothCores = BothCores.TestCase
TestBothCores.settings = settings(
    max_examples=int(os.environ.get("STATEFUL_EXAMPLES", "50")),
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
