"""A chaos run's bodies record their own end, whatever ends them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from celery_durable.message import ATTEMPT_HEADER, RUN_HEADER
from tests.chaos import history
from tests.chaos.app import make_app


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_body_that_is_stopped_as_it_ends_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    records = tmp_path / "history"
    database = {"client_id": "a", "database_url": f"sqlite:///{tmp_path}/a.sqlite3"}
    task = make_app("a", {}, database, str(records)).tasks["chaos.plain"]
    write = history.write
    interruptions = [SoftTimeLimitExceeded()] if interrupted else []

    def interrupted_write(path: Path, event: Any) -> None:
        if isinstance(event, history.Ended) and interruptions:
            raise interruptions.pop()
        write(path, event)

    monkeypatch.setattr(history, "write", interrupted_write)
    task.push_request(id="one", **{RUN_HEADER: {"token": "t", "pid": 0}, ATTEMPT_HEADER: 1})
    try:
        if interrupted:
            with pytest.raises(SoftTimeLimitExceeded):
                task.run("succeed", 0.0, "", "")
        else:
            assert task.run("succeed", 0.0, "", "") == "t"
    finally:
        task.pop_request()
    ended = [event for event in history.read(records) if isinstance(event, history.Ended)]
    assert [(event.token, event.how) for event in ended] == [("t", "aborted" if interrupted else "returned")]
