"""The simulator's shortcut to SQLite changes nothing but the time that a run takes."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from sqlalchemy import Connection

from tests.simulation.run import run, simulator
from tests.simulation.statements import Prepared, QuickConnection


@pytest.mark.parametrize("seed", [4, 7, 23])
def test_a_seed_has_the_same_log_when_sqlalchemy_executes_everything(seed):
    """Every statement, value and row is the same, those of a crash and a restored database too."""
    with simulator():
        with patch.object(Prepared, "execute", autospec=True, side_effect=Prepared.execute) as quick:
            digest = run(seed).digest
        assert quick.call_count > 100, "it took no shortcut"
        with patch.object(QuickConnection, "execute", Connection.execute):
            assert run(seed).digest == digest
