"""A holder process that stands still in the middle of a transaction, for longer than its session (case A17)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holder_service import store
from holder_service.store import Row
from tests.crashing.orders import Orders
from tests.harness import Process, Stack, wait_until
from tests.integration.holder_rig import Rig

pytestmark = [pytest.mark.processes, pytest.mark.postgresql, pytest.mark.kafka]

SESSION_MS = 1_000
DEADLINE_S = 90.0


@pytest.fixture
def rig(real_stack: Stack) -> Iterator[Rig]:
    """Clients and a look into the database of the stack's holders."""
    env = real_stack.holder_env(kafka_session_timeout_ms=SESSION_MS)
    rig = Rig(env["HOLDER_DATABASE_URL"], real_stack.kafka, group_id=env["HOLDER_GROUP_ID"], makes_topics=False)
    yield rig
    rig.close()


def row_of(rig: Rig, account: str) -> Row:
    """The account's row."""
    with rig.database.reading() as connection:
        return store.load_rows(connection, rig.tables, [account])[account]


def test_a_holder_frozen_before_its_commit_commits_nothing(rig: Rig, real_stack: Stack, tmp_path: Path) -> None:
    """Case A17: SIGSTOP where it would commit; another takes its partitions over and goes on; SIGCONT."""
    orders, point = Orders(tmp_path / "orders"), "holder.batch.before_commit"
    env = {**real_stack.holder_env(kafka_session_timeout_ms=SESSION_MS), **orders.env}
    command = [sys.executable, "-m", "holder_service.cli", "run"]
    older = real_stack.started(Process("older", command, folder=real_stack.folder, env=env))
    client = rig.client("billing")
    client.report("acme", waiting=2)
    wait_until(lambda: client.try_to_claim("acme"), DEADLINE_S, what="a permit")
    wait_until(lambda: (client.pump(), client.answered.get("acme") == client.seq)[1], DEADLINE_S, what="an answer")

    orders.give(f"{point}:1=sleep:3")
    lost = client.report("acme", waiting=7)
    wait_until((tmp_path / "orders" / f"passed.{point}").exists, DEADLINE_S, what="the older one at its commit")
    older.freeze()
    orders.withdraw()
    real_stack.holder(label="successor", kafka_session_timeout_ms=SESSION_MS)
    newest = client.report("acme", waiting=0)
    wait_until(lambda: (client.pump(), client.answered["acme"] == newest.seq)[1], DEADLINE_S, what="the successor")
    before = row_of(rig, "acme")
    assert before.state.clients["billing"].seq == newest.seq > lost.seq
    rig.look([client], ["acme"], limit=1)

    logged = len(older.log.read_text())
    older.thaw()
    wait_until(lambda: len(older.log.read_text()) > logged, DEADLINE_S, what="a word of the older one")
    # Whoever of the two answers this has read all that was there before.
    other = client.report("other", waiting=1)
    wait_until(lambda: (client.pump(), client.answered.get("other") == other.seq)[1], DEADLINE_S, what="an answer")
    assert row_of(rig, "acme") == before
    rig.look([client], ["acme"], limit=1)
    rig.invariants.require("bound", "covers", "version")
    assert older.alive
