"""What a dispatcher tells of ends that nobody else has told (case C23), on real databases."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.backends.cache import CacheBackend
from sqlalchemy import select, update

from celery_durable import DurableTask
from celery_durable.dispatcher.telling import Telling
from celery_durable.runtime import runtime_of
from celery_durable.store.untold import TRIES_MAX, Mark, Untold
from tests.dispatching import Service, steps

Part = tuple[str, str]


class Counting(CacheBackend):  # type: ignore[misc]
    """A result backend that counts a chord's members by increments."""

    parts: list[Part]

    def incr(self, key: Any) -> int:
        """Notes it."""
        self.parts.append(("member", str(key)))
        return 0


@pytest.fixture
def app(service: Service) -> Iterator[Celery]:
    app = Celery("billing", broker="memory://", set_as_current=False)
    url = service.runtime.settings.database_url.get_secret_value()
    app.conf.durable = {"client_id": "billing", "database_url": url, "kafka_bootstrap_servers": "127.0.0.1:1"}
    counting = Counting(app=app, url="memory://")
    counting.parts = []

    @app.task(base=DurableTask, shared=False, name="t", backend=counting)
    def t() -> None:
        """Never runs here."""

    yield app
    runtime_of(app).database.dispose()


@pytest.fixture
def backend(app: Celery) -> Counting:
    found: Counting = app.tasks["t"].backend.forward_to
    return found


def ended(service: Service, *, body: bytes = b"[[], {}, {}]", **columns: Any) -> str:
    """An operation that has ended, and whose end was not told; it is due."""
    operation_id = uuid.uuid4().hex  # the backend in memory is one for the process
    row = {"account": None, "wakes": False, "state": "succeeded", "ended_at": 1, "body": body, **columns}
    service.add(operation_id, **row)
    with service.database.transaction() as connection:
        Untold(service.tables).mark(connection, [operation_id])
    return operation_id


def test_an_end_is_told_as_it_is(service: Service, app: Celery, backend: Counting) -> None:
    """C23: as what the row says, and the mark is gone."""
    succeeded = ended(service)
    failed = ended(service, state="failed", error="ValueError: no")
    cancelled = ended(service, state="cancelled", error="not wanted")
    steps(Telling(app, service.runtime).step)
    states = [backend.get_state(each) for each in (succeeded, failed, cancelled)]
    assert states == ["SUCCESS", "FAILURE", "REVOKED"]
    assert service.count("untold") == 0


def test_a_backend_that_counts_by_increments_counts_once(
    service: Service, app: Celery, backend: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C23: it has the member's result, so it was told before; another increment would complete the chord too early."""
    monkeypatch.setattr("celery.backends.base.GroupResult.restore", lambda *_, **__: [1, 2])
    chord = {"task": "body", "args": [], "kwargs": {}, "options": {}, "subtask_type": None, "immutable": False}
    body = json.dumps([[], {}, {"chord": chord}]).encode()
    member = ended(service, body=body, headers={"task": "t", "group": "g"})
    telling = Telling(app, service.runtime)
    steps(telling.step)
    assert len(backend.parts) == 1
    with service.database.transaction() as connection:
        Untold(service.tables).mark(connection, [member])
    steps(telling.step)
    assert len(backend.parts) == 1
    assert service.count("untold") == 0


def test_one_that_cannot_be_told_stops_no_other(
    service: Service, app: Celery, backend: Counting, caplog: pytest.LogCaptureFixture
) -> None:
    """C23: what cannot be read is tried again later, and said."""
    broken = ended(service, body=b"{")
    fine = ended(service)
    with caplog.at_level(logging.WARNING):
        steps(Telling(app, service.runtime).step)
    assert backend.get_state(fine) == "SUCCESS"
    assert broken in caplog.text
    assert service.count("untold") == 1


def test_many_that_cannot_be_told_stop_no_other(service: Service, app: Celery, backend: Counting) -> None:
    """C23: they are due first in each batch, and failed in no time: nobody else's turn came."""
    for _ in range(30):
        ended(service, body=b"{")
    fine = ended(service)
    Telling(app, service.runtime).step()
    assert backend.get_state(fine) == "SUCCESS"
    assert service.count("untold") == 30


def test_what_can_never_be_told_is_given_up_loudly(
    service: Service, app: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    """C23: not tried every five minutes for ever, nor is its operation kept for ever."""
    broken, young = ended(service, body=b"{"), ended(service, body=b"{")
    untold = service.tables.untold
    with service.database.transaction() as connection:
        given_up = update(untold).where(untold.c.operation_id == broken).values(tries=TRIES_MAX)
        connection.execute(given_up)
    Telling(app, service.runtime).step()
    with service.database.reading() as connection:
        assert list(connection.scalars(select(untold.c.operation_id))) == [young]
    assert [record.levelname for record in caplog.records if broken in record.getMessage()] == ["ERROR"]


def test_large_bodies_are_not_loaded_together(
    service: Service, app: Celery, backend: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C23: 200 of several MB each would fill the memory."""
    body = json.dumps([["x" * 600], {}, {}]).encode()
    marked = [ended(service, body=body) for _ in range(5)]
    monkeypatch.setattr("celery_durable.store.untold.BYTES_MAX", 1_500)
    load, loaded = Untold.load, []

    def counted(self: Untold, connection: Any, marks: Any) -> Any:
        found = load(self, connection, marks)
        loaded.append(len(found))
        return found

    monkeypatch.setattr(Untold, "load", counted)
    steps(Telling(app, service.runtime).step)
    assert sorted(loaded) == [1, 2, 2]
    assert {backend.get_state(each) for each in marked} == {"SUCCESS"}
    assert service.count("untold") == 0


def test_what_runs_again_is_not_told(service: Service, app: Celery, backend: Counting) -> None:
    """C23: retried by hand in between: the mark of the earlier end goes, and leaves a later one alone."""
    again, later = ended(service), ended(service)
    service.change(again, state="running", generation=2)
    with service.database.transaction() as connection:
        Untold(service.tables).told(connection, [Mark(later, 7)])
    assert service.count("untold") == 2
    steps(Telling(app, service.runtime).step)
    assert backend.get_state(again) == "PENDING"
    assert service.count("untold") == 0


def test_retention_keeps_what_is_to_be_told(service: Service, app: Celery) -> None:
    """C23: a result that Redis does not have yet is not deleted."""
    kept = ended(service)
    steps(service.retention().step)
    assert service.row(kept).state == "succeeded"
    steps(Telling(app, service.runtime).step)
    steps(service.retention().step)
    assert service.count("operations") == 0


def test_what_is_ignored_is_not_kept(service: Service, app: Celery, backend: Counting) -> None:
    """C23: nor would a worker have had it kept."""
    headers = {"task": "t", "ignore_result": True}
    ignored = [ended(service, state=state, headers=headers) for state in ("succeeded", "failed", "cancelled")]
    steps(Telling(app, service.runtime).step)
    assert {backend.get_state(each) for each in ignored} == {"PENDING"}
    assert service.count("untold") == 0


def test_an_errback_that_exits_is_called_once_and_stops_no_other(
    service: Service, app: Celery, backend: Counting
) -> None:
    """C23: Celery takes an Exception of an errback for told; ``sys.exit()`` ended the dispatcher's thread."""
    called: list[str] = []

    @app.task(shared=False, name="on_error")
    def on_error(request: Any, error: Any, traceback: Any) -> None:
        called.append(request.id)
        raise SystemExit(3)

    body = json.dumps([[], {}, {"errbacks": [on_error.s()]}]).encode()
    exits = ended(service, state="failed", error="ValueError: no", body=body)
    fine = ended(service)
    steps(Telling(app, service.runtime).step)
    assert called == [exits]
    assert backend.get_state(fine) == "SUCCESS"
    assert service.count("untold") == 0
