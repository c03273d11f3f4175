"""Real holder processes: their commands, their ends, and what they load."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from celery_durable.permits.messages import SetLimit
from holder_service.cli import main
from tests.harness import Stack, wait_until
from tests.integration.holder_rig import Race, Rig

pytestmark = pytest.mark.processes

EVERY_MODULE = """
import importlib, pkgutil, sys, threading
import holder_service
for module in pkgutil.walk_packages(holder_service.__path__, "holder_service."):
    if ".versions." not in module.name:
        importlib.import_module(module.name)
from holder_service import main, settings
stop = threading.Event()
threading.Timer(1.0, stop.set).start()
assert main.run(settings.load(), stop=stop) == 0
loaded = {name.partition(".")[0] for name in sys.modules}
assert "confluent_kafka" in loaded
print(sorted(loaded & {"celery", "kombu", "billiard", "vine", "amqp"}))
"""


@pytest.fixture
def rig(real_stack: Stack) -> Iterator[Rig]:
    """Clients and a look into the database of the stack's holders, on PostgreSQL and Kafka."""
    env = real_stack.holder_env()
    rig = Rig(env["HOLDER_DATABASE_URL"], real_stack.kafka, group_id=env["HOLDER_GROUP_ID"], makes_topics=False)
    yield rig
    rig.close()


def test_the_holder_never_loads_celery(embedded_stack: Stack) -> None:
    """Design, section 5: nor kombu, nor billiard; looked at after a run, with every module imported."""
    done = subprocess.run(
        [sys.executable, "-c", EVERY_MODULE],
        env={**os.environ, **embedded_stack.holder_env()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_commands_of_an_operator(rig: Rig, real_stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """`accounts` shows limit, in use, waiting and clients; `go` refuses what makes no sense; SIGTERM ends a holder."""
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    runner, env = CliRunner(), real_stack.holder_env()

    def run(*words: str) -> Result:
        return runner.invoke(main, words, env=env)

    assert run("accounts").stdout.strip() == "no account has anything in use or waiting"
    client = rig.client("billing")
    holder = real_stack.holder()
    client.command(SetLimit(client_id="ops", account="tenant:[acme]", seq=1, limit=2))
    client.report("tenant:[acme]", waiting=3)
    for _ in range(2):
        wait_until(lambda: client.try_to_claim("tenant:[acme]"), what="a permit")
    wait_until(lambda: (usage := rig.usage("tenant:[acme]")) and usage.in_use == 2, what="the claims")

    listed = json.loads(run("accounts", "--json").stdout)
    assert [(u["account"], u["limit"], u["in_use"], u["waiting"], u["footprint"]) for u in listed] == [
        ("tenant:[acme]", 2, 2, 1, 2)
    ]
    assert [(c["client_id"], c["in_use"], c["must_acknowledge"]) for c in listed[0]["clients"]] == [
        ("billing", 2, False)
    ]
    table = run("accounts").stdout
    assert "tenant:[acme]" in table
    assert "billing" in table
    assert "waited and now go on: 0" in run("go", "--all").stdout
    refused = run("go", "nobody")
    assert (refused.exit_code, "nobody" in refused.stderr) == (1, True)
    assert run("topics", "apply", "--client", "other").exit_code == 0

    assert holder.terminate() == 0


def test_holders_that_are_killed_at_any_moment_lose_and_double_nothing(rig: Rig, real_stack: Stack) -> None:
    """Cases A16 and A9: SIGKILL at random moments while two clients race; one permit at most, and all are served."""
    clients = [rig.client("billing"), rig.client("shipping")]
    accounts = [f"race:{number}" for number in range(30)]
    dice = random.Random(16)
    holders = [real_stack.holder(), real_stack.holder()]
    wanted = 6
    for account in accounts:
        for client in clients:
            client.report(account, waiting=wanted)
    race = Race(rig, clients, accounts, dice)
    kills = [0.15, 0.4, 0.7]
    total = 2 * wanted * len(accounts)

    def over() -> bool:
        race.step()
        if kills and len(race.ended) >= kills[0] * total:
            kills.pop(0)
            holders.pop(0).send(signal.SIGKILL)
            holders.append(real_stack.holder())
        return len(race.ended) == total

    wait_until(over, 90, what="all to be served")
    assert not kills
    wait_until(rig.give_back(clients), 60, what="rest")
    rig.invariants.require("bound", "covers", "version", "quiescence", "rows")


def test_a_holder_that_was_frozen_commits_nothing_over_its_successor(rig: Rig, real_stack: Stack) -> None:
    """Cases A17 and B9: SIGSTOP beyond the session; its partitions go to another; SIGCONT."""
    client = rig.client("billing")
    accounts = [f"tenant:{number}" for number in range(20)]
    frozen = real_stack.holder(kafka_session_timeout_ms=1_000)
    for account in accounts:
        client.report(account, waiting=1)
    wait_until(lambda: (client.pump(), len(client.answered) == len(accounts))[1], what="all answers")
    # It is stopped in the middle of its work: reports flow while the signal comes.
    for account in accounts:
        client.report(account)
    frozen.freeze()
    for account in accounts:
        client.report(account)
    successor = real_stack.holder(kafka_session_timeout_ms=1_000)
    newest = {account: client.seq - len(accounts) + 1 + number for number, account in enumerate(accounts)}
    wait_until(lambda: (client.pump(), client.answered == newest)[1], what="all answers of the successor")
    frozen.thaw()
    in_use: set[str] = set()
    for account in accounts:
        client.report(account)

    def claim() -> bool:
        for account in accounts:
            if client.try_to_claim(account):
                rig.look([client], [account], limit=1)
                in_use.add(account)
        return len(in_use) == len(accounts)

    wait_until(claim, what="every permit once")
    assert successor.alive
    assert frozen.alive
