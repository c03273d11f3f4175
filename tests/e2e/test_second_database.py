"""Two databases under one ``client_id``: a blue one that works, and a green one that somebody started beside it."""

from __future__ import annotations

import pytest

from celery_durable.runtime import runtime_of
from tests.e2e.observe import History, Letter, holder_usage, read_topic, rows, states, wait_ended
from tests.harness import Service, Stack, wait_until

pytestmark = pytest.mark.processes

ACCOUNTS = [f"tenant:{number}" for number in range(16)]
"""Enough for every partition of the replies topic."""


def refused(service: Service) -> list[Letter]:
    """The dead letters of reports."""
    settings = runtime_of(service.app).settings
    found = read_topic(service.stack.kafka, settings.dead_letters_topic)
    return [letter for letter in found if letter.headers["topic"] == settings.accounts_topic]


def test_a_second_database_under_one_name_is_refused(real_stack: Stack) -> None:
    """Case A35: its reports are dead letters with the reason, nothing of the first is freed, and the first goes on."""
    stack = real_stack
    blue = stack.service("billing")
    green = stack.service("green", client_id="billing")
    holder = stack.holder()
    dispatcher = blue.dispatcher()
    blue.worker(concurrency=4)
    account, flag = "tenant:held", blue.folder / "go"
    held = [blue.task("until").delay(account, str(flag)) for _ in range(2)]
    wait_until(lambda: len(History([blue]).starts(account)) == 2, 60, what="both permits are in use")

    green.dispatcher()
    for name in (account, "tenant:only-green"):
        green.task("work").delay(name)
    letters = wait_until(lambda: found if len(found := refused(green)) >= 1 else None, 60, what="a dead letter")
    assert "while database" in letters[0].headers["reason"]
    remedy = "give the second database a client_id of its own"
    assert remedy in letters[0].headers["reason"]
    wait_until(lambda: remedy in holder.log.read_text(), 60, what="the holder's word of it")

    # Green reads the replies that are blue's, and must not take them away from it.
    wait_until(lambda: rows(green, "offsets", "next_offset"), 60, what="green reads replies")
    for name in ACCOUNTS:
        blue.task("work").delay(name)
    for name in ACCOUNTS:
        wait_ended(blue, name, 1)
    assert "restored" not in dispatcher.log.read_text()
    assert holder_usage(stack)[account]["footprint"] == 2
    assert states(green, account) == {"queued": 1}
    flag.touch()
    assert all(result.get(timeout=60) for result in held)
    History([blue]).check_bound(2)
