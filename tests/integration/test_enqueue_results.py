"""Results are read from the operations' rows, whatever the app's own result backend is."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
from celery import Celery, _state, chord, states
from celery.exceptions import TaskError, TaskRevokedError, TimeoutError
from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from celery_durable import DurableAsyncResult, DurableTask, EnqueueError, using
from celery_durable.outcomes import Encoded, encode_exception, encode_result
from celery_durable.results import CELERY_STATES, DurableBackend
from celery_durable.runtime import runtime_of
from celery_durable.store.clock import now_ms
from celery_durable.store.schema import STATES
from tests.dispatching import counted_statements
from tests.integration.enqueue_service import Service, body_of_plain, service


def put(
    shop: Service, result: DurableAsyncResult[Any], state: str, encoded: Encoded | None = None, **values: Any
) -> None:
    """What dispatcher and worker do to the row."""
    operations = shop.tables.operations
    if encoded is not None:
        values |= {
            "result": encoded.data,
            "result_content_type": encoded.content_type,
            "result_content_encoding": encoded.content_encoding,
        }
    if state in ("succeeded", "failed", "cancelled"):
        values.setdefault("ended_at", now_ms())
    with shop.runtime.database.transaction() as connection:
        connection.execute(update(operations).where(operations.c.id == result.id).values(state=state, **values))


def test_every_state_has_its_celery_state() -> None:
    assert set(CELERY_STATES) == set(STATES)


def test_states_from_outside(shop: Service) -> None:
    """D2: waiting is PENDING, with the reason in info; then STARTED, RETRY, SUCCESS."""
    result = shop.charge.delay("acme", "wf-7")
    assert (result.state, result.info["state"], result.info["reason"]) == (states.PENDING, "queued", "permit")
    assert (result.info["account"], result.info["group"]) == ("tenant:acme", "wf-7")
    with shop.runtime.database.transaction() as connection:
        connection.execute(
            insert(shop.tables.accounts).values(account="tenant:acme", state="{}", blocked={"wf-7": "group_limit"})
        )
    assert result.info["reason"] == "group_limit"
    put(shop, result, "admitted")
    assert (result.state, result.info["reason"]) == (states.PENDING, "admitted")
    put(shop, result, "admitted", sends=1)
    assert (result.state, result.info["reason"]) == (states.PENDING, "sent")
    put(shop, result, "running", worker="celery@host", started_at=now_ms())
    assert (result.state, result.info["hostname"]) == (states.STARTED, "celery@host")
    assert not result.ready()
    put(shop, result, "retrying", error="ValueError: later", due_at=now_ms())
    assert result.state == states.RETRY
    assert "ValueError: later" in str(result.info)
    put(shop, result, "succeeded", encode_result(shop.app, {"amount": 12}, "t"))
    assert (result.state, result.result, result.get(timeout=5)) == (states.SUCCESS, {"amount": 12}, {"amount": 12})
    assert result.successful()
    assert result.date_done is not None
    assert (result.name, result.worker) == ("charge", "celery@host")


def test_an_eta_is_the_reason(shop: Service) -> None:
    result = shop.charge.apply_async(("acme",), countdown=100)
    assert (result.state, result.info["reason"]) == (states.PENDING, "eta")
    assert result.info["due_at"].endswith("+00:00")


def test_failures_raise_what_the_task_raised(shop: Service) -> None:
    result = shop.plain.delay()
    encoded = encode_exception(shop.app, ZeroDivisionError("by zero"), bytes_max=1_000)
    put(shop, result, "failed", encoded, error="ZeroDivisionError: by zero", traceback="Traceback …")
    assert (result.state, result.failed(), result.traceback) == (states.FAILURE, True, "Traceback …")
    with pytest.raises(ZeroDivisionError, match="by zero"):
        result.get(timeout=5)
    assert isinstance(result.get(propagate=False), ZeroDivisionError)


def test_a_failure_of_which_only_the_text_is_known(shop: Service) -> None:
    result = shop.plain.delay()
    put(shop, result, "failed", error="lost its worker 3 times")
    with pytest.raises(TaskError, match="lost its worker 3 times"):
        result.get(timeout=5)


def test_an_unknown_id_is_pending_as_in_celery(shop: Service) -> None:
    result = shop.plain.AsyncResult("nobody")
    assert (result.state, result.info, result.exists()) == (states.PENDING, None, False)
    with pytest.raises(TimeoutError, match=r"nobody has not ended within 0 s.*celery -A <app> durable why nobody"):
        result.get(timeout=0)
    assert result.cancel() == "unknown"


def test_who_waits_for_an_unknown_id_is_told_once(
    shop: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in Celery it may wait for ever, but not silently; for one that is there nothing is said."""
    monkeypatch.setattr("celery_durable.results.UNKNOWN_S", 0)
    known = shop.plain.delay()
    for result in (known, shop.plain.AsyncResult("never-enqueued")):
        with pytest.raises(TimeoutError):
            result.get(timeout=0.1)
    assert caplog.text.count("Waiting for never-enqueued: this service's database has no such operation") == 1
    assert known.id not in caplog.text


@pytest.mark.parametrize("wrong", [5, "a\0b", "\ud800", b"x", "x" * 100_000])
def test_an_id_that_no_operation_can_have_is_unknown(shop: Service, wrong: Any) -> None:
    """An ID may come from outside: it is never an error of the database, least of all in the caller's transaction."""
    result = shop.plain.AsyncResult(wrong)
    assert (result.state, result.cancel()) == (states.PENDING, "unknown")


@pytest.mark.parametrize("wrong", [None, 5, b"x", {}])
def test_a_reason_that_is_no_text_is_refused(shop: Service, wrong: Any) -> None:
    result = shop.plain.delay(1)
    with pytest.raises(EnqueueError, match=r"reason = .*give a text"):
        result.cancel(wrong)
    assert result.state == states.PENDING


def test_a_reason_of_any_shape_is_kept_bounded(shop: Service) -> None:
    result = shop.plain.delay(1)
    assert result.cancel("a\0\ud800" + "x" * 5_000_000) == "cancelled"
    assert len(shop.operation(result.id).error) <= 20_000


def test_get_waits_without_a_hot_poll(shop: Service) -> None:
    """It asks ever less often, and sees the end within its interval."""
    result = shop.plain.delay()
    with counted_statements(shop.runtime.database) as polls, pytest.raises(TimeoutError):
        result.get(timeout=1.0)
    assert 2 <= len(polls) <= 12
    timer = threading.Timer(0.3, lambda: put(shop, result, "succeeded", encode_result(shop.app, 7, "t")))
    timer.start()
    assert result.get(timeout=20, interval=0.05) == 7
    timer.join()


def test_waiting_inside_the_own_transaction_is_refused(shop: Service) -> None:
    """It would wait for ever: nothing runs before the commit."""
    with Session(shop.runtime.database.engine) as session, using(session):
        result = shop.plain.delay()
        with pytest.raises(RuntimeError, match="is not committed yet"):
            result.get(timeout=5)
        session.rollback()


def test_cancel_of_what_waits_ends_it_with_a_wake(shop: Service) -> None:
    """A25: it frees nothing and changes no other; no account's row is written."""
    result, other = shop.charge.delay("acme"), shop.charge.delay("acme")
    wakes = shop.count(shop.tables.wakes)
    assert result.cancel() == "cancelled"
    assert result.cancel() == "ended"
    assert (result.state, other.state) == (states.REVOKED, states.PENDING)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=5)
    assert shop.count(shop.tables.wakes) == wakes + 1
    assert shop.count(shop.tables.accounts) == 0
    plain = shop.plain.delay()
    assert plain.cancel() == "cancelled"
    assert shop.operation(plain.id).due_at is None
    assert shop.count(shop.tables.wakes) == wakes + 1


@pytest.mark.parametrize("state", ["admitted", "retrying"])
def test_cancel_of_what_holds_a_permit_without_running_ends_it(shop: Service, state: str) -> None:
    result = shop.charge.delay("acme")
    put(shop, result, state)
    result.revoke()
    assert result.state == states.REVOKED
    assert shop.operation(result.id).error == "revoked"


def test_cancel_of_what_runs_is_a_request(shop: Service) -> None:
    """A25: the permit stays with the running attempt."""
    result = shop.charge.delay("acme")
    put(shop, result, "running", run_token="t")
    wakes = shop.count(shop.tables.wakes)
    assert result.cancel() == "requested"
    first = shop.operation(result.id)
    assert (first.state, first.run_token, first.ended_at, first.error) == ("running", "t", None, None)
    assert first.cancel_requested_at is not None
    assert result.cancel() == "requested"
    assert shop.operation(result.id).cancel_requested_at == first.cancel_requested_at
    assert shop.count(shop.tables.wakes) == wakes
    assert "cancel_requested_at" in result.info


def test_cancel_belongs_to_the_callers_transaction(shop: Service) -> None:
    """D11"""
    result = shop.charge.delay("acme")
    with Session(shop.runtime.database.engine) as session:
        with using(session):
            assert result.cancel() == "cancelled"
        session.rollback()
    assert result.state == states.PENDING


def test_forget_drops_the_result_and_keeps_the_id(shop: Service) -> None:
    """A1: dedup reaches as far as retention."""
    result = shop.plain.apply_async((1,), task_id="order-81")
    put(shop, result, "succeeded", encode_result(shop.app, 7, "t"))
    assert result.get(timeout=5) == 7
    result.forget()
    assert (result.state, result.result) == (states.SUCCESS, None)
    assert shop.plain.apply_async((1,), task_id="order-81").duplicate


def test_as_the_apps_own_result_backend(sqlite_url: str) -> None:
    """``result_backend = "durable://"``, by the entry point; what it does not keep, it says."""
    with service(sqlite_url) as shop:
        app = Celery("billing", broker="redis://127.0.0.1:1", backend="durable://", set_as_current=False)
        app.conf.durable = {**shop.app.conf.durable}
        task = app.task(base=DurableTask, shared=False, lazy=False, name="plain")(body_of_plain)
        assert isinstance(app.backend, DurableBackend)
        result = task.delay(1)
        assert app.AsyncResult(result.id).info["state"] == "admitted"
        with pytest.raises(NotImplementedError, match="durable:// keeps no saved groups"):
            app.GroupResult("g", [result]).save()
        app.close()


def test_results_can_be_pickled(shop: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    result = shop.plain.delay()
    monkeypatch.setattr(_state._tls, "current_app", shop.app)  # of this thread, for this test
    again = pickle.loads(pickle.dumps(result))
    assert (type(again), again.id) == (DurableAsyncResult, result.id)
    assert again.state == states.PENDING


def test_a_task_whose_results_are_pickled(sqlite_url: str) -> None:
    """Any serializer that the app accepts."""
    with service(sqlite_url) as shop:
        shop.app.conf.update(result_serializer="pickle", result_accept_content=["pickle"])
        result = shop.plain.delay()
        put(shop, result, "succeeded", encode_result(shop.app, {1, 2}, "t"))
        stored = shop.rows(shop.tables.operations, "id", "result_content_type")
        assert stored[0].result_content_type == "application/x-python-serialize"
        assert result.get(timeout=5) == {1, 2}
        with shop.runtime.database.reading() as connection:
            assert connection.execute(select(shop.tables.operations.c.result)).scalar_one() is not None


def test_an_app_without_a_result_backend_reads_operations_and_drops_the_rest(shop: Service) -> None:
    """D2: ``app.AsyncResult(id)``, for code that has the ID alone. Plain tasks go on as with Celery's own."""
    app = Celery("billing", broker="memory://", set_as_current=False)
    app.conf.durable = dict(shop.app.conf.durable)

    @app.task(name="plain", shared=False)
    def plain(x: int) -> int:
        return x

    result = shop.charge.delay("acme", "wf-7")
    put(shop, result, "succeeded", encode_result(shop.app, {"charged": 12}, "t"))
    found = app.AsyncResult(result.id)
    assert (found.state, found.get(timeout=1)) == (states.SUCCESS, {"charged": 12})
    assert app.backend.as_uri() == "disabled://"
    unknown = plain.delay(1)
    app.backend.mark_as_done(unknown.id, 1)
    for ask in (lambda: unknown.state, lambda: unknown.get(timeout=60), unknown.forget):
        with pytest.raises(NotImplementedError, match="no result backend is configured"):
            ask()
    with pytest.raises(NotImplementedError, match="chord"):
        chord([plain.s(1)], plain.s()).apply_async()
    found.forget()
    runtime_of(app).database.dispose()


def test_an_app_that_is_not_this_package_s_has_no_results_as_before() -> None:
    app = Celery("other", broker="memory://", set_as_current=False)
    app.conf.durable = {}
    with pytest.raises(NotImplementedError, match="no result backend is configured"):
        app.AsyncResult("any").get(timeout=60)
