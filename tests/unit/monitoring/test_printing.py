"""What operators read on their terminals."""

from __future__ import annotations

import pytest

from celery_durable.monitoring import printing
from celery_durable.monitoring.inspect import Account, AccountGroup, Attempt, Explanation, Operation


def test_names_from_outside_do_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """E5 (as shown): an account may be any text; its escapes and line ends are written out, the rest is as it is."""
    group = AccountGroup("g\n[bold]", 0, 0, 1, None)
    account = Account("\x1b[31mré😀[red]\u202e", 1, "default", 0, 0, 1, 0, None, [group])
    printing.accounts([account])
    shown = capsys.readouterr().out
    assert r"\x1b[31mré😀[red]\u202e" in shown
    assert r"g\n[bold]" in shown
    assert "\x1b" not in shown
    assert shown.count("\n") == 3


def test_a_pipe_gets_each_row_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """For ``grep``, whatever the length of names from outside."""
    long = "a" * 150
    printing.operations(
        [Operation(long, long, "queued", long, "", "celery", 0, 1, None, 9.0, None, None, None, "w" * 300)]
    )
    assert capsys.readouterr().out.count("\n") == 2
    printing.accounts([Account(long, 1, f"rule {long}", 0, 0, 1, 0, None, [AccountGroup(long, 0, 0, 1, None)])])
    assert capsys.readouterr().out.count("\n") == 3


def test_a_group_s_limit_is_shown_with_whose_word_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    groups = [AccountGroup("wf-7", 2, 2, 1, "group_limit", 2), AccountGroup("wf-8", 1, 1, 0, None)]
    printing.accounts([Account("acme", 9, "rule *", 3, 3, 1, 0, 4.0, groups)])
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert rows[2:] == ["wf-7 2 (declared) 2 1 group limit", "wf-8 1 0"]


def test_an_ended_operation_is_not_explained_by_its_account(capsys: pytest.CaptureFixture[str]) -> None:
    """G1: an idle account has no reply any more; to say so of an operation that is over looks like a fault."""
    over = Operation(
        "order-81", "shop.mail", "succeeded", "mail", "", "celery", 0, 1, "w", 9.0, 1.0, None, None, "succeeded"
    )
    printing.explanation(
        Explanation(over, None, "succeeded", 0, None, 0, [], [Attempt(1, "retried", "w", 8.0, "down")])
    )
    assert capsys.readouterr().out.splitlines() == [
        "order-81  shop.mail  succeeded",
        "Attempt 1 retried 8.0 s ago: down",
    ]
