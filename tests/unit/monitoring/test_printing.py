"""What operators read on their terminals."""

from __future__ import annotations

import pytest

from celery_durable.monitoring import printing
from celery_durable.monitoring.inspect import Account, AccountGroup


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
