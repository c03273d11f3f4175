"""How long a retry waits, and what is never retried."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import select

from celery_durable import DurableTask, NonRetryable, durable_task
from celery_durable.errors import ConfigurationError, EnqueueError
from celery_durable.runtime import runtime_of
from celery_durable.store.clock import now_ms
from tests.unit.worker.here import run_here


class Declined(NonRetryable):
    """No other attempt can mend it."""


def failing(app: Celery, error: Exception, **options: Any) -> Any:
    """A task whose body raises ``error``, with ``autoretry_for`` or by ``self.retry()``."""

    @app.task(base=DurableTask, bind=True, shared=False, **options)
    def fails(self: Any) -> None:
        if "autoretry_for" in options:
            raise error
        try:
            raise error
        except Exception as caught:
            raise self.retry(exc=caught) from caught

    return fails


def due_in_s(app: Celery, operation: Any) -> float:
    """Until the operation's next attempt is due."""
    operations = runtime_of(app).tables.operations
    with runtime_of(app).database.reading() as connection:
        row = connection.execute(
            select(operations.c.due_at, now_ms().label("now")).where(operations.c.id == operation.id)
        ).one()
    return float(row.due_at - row.now) / 1000


ASKING = pytest.mark.parametrize("asking", [{}, {"autoretry_for": (Exception,)}], ids=["self.retry", "autoretry_for"])


@ASKING
@pytest.mark.parametrize(("gives", "seconds"), [(50, 50), (timedelta(seconds=40), 40), (None, 20), (0, 0)])
def test_retry_delay_says_how_long(app: Celery, asking: dict[str, Any], gives: Any, seconds: float) -> None:
    """None leaves it to Celery's own option."""
    asked: list[tuple[str, int]] = []

    def delay(error: BaseException | None, retries: int) -> Any:
        asked.append((str(error), retries))
        return gives

    task = failing(app, OSError("away"), retry_delay=delay, default_retry_delay=20, **asking)
    operation = run_here(task)
    assert asked == [("away", 0)]
    assert due_in_s(app, operation) == pytest.approx(seconds, abs=5)


@pytest.mark.parametrize("says", [{"countdown": 30}, {"eta": True}])
def test_what_the_body_says_comes_first(app: Celery, says: dict[str, Any]) -> None:
    @app.task(base=DurableTask, bind=True, shared=False, retry_delay=lambda _error, _retries: 1_000)
    def fails(self: Any) -> None:
        eta = {"eta": datetime.now(UTC) + timedelta(seconds=30)} if "eta" in says else says
        raise self.retry(**eta)

    assert due_in_s(app, run_here(fails)) == pytest.approx(30, abs=5)


def test_what_retry_kwargs_say_comes_first(app: Celery) -> None:
    options = {"autoretry_for": (OSError,), "retry_kwargs": {"countdown": 30}}
    operation = run_here(failing(app, OSError("away"), retry_delay=lambda _error, _retries: 1_000, **options))
    assert due_in_s(app, operation) == pytest.approx(30, abs=5)


@ASKING
def test_nobody_asks_for_a_delay_after_the_last_retry(app: Celery, asking: dict[str, Any]) -> None:
    """The operation fails with its own error, not with one of the callable's."""
    operation = run_here(failing(app, OSError("away"), retry_delay=_raises, max_retries=0, **asking))
    assert operation.state == "FAILURE"
    assert isinstance(operation.result, OSError)


def _raises(_error: object, _retries: int) -> float:
    raise ZeroDivisionError("by zero")


@ASKING
@pytest.mark.parametrize(
    ("delay", "told"),
    [
        (_raises, "retry_delay: its callable raised ZeroDivisionError: by zero"),
        (lambda _error, _retries: "soon", "retry_delay gave 'soon': give seconds"),
        (lambda _error, _retries: True, "retry_delay gave True: give seconds"),
        (lambda _error, _retries: float("nan"), "countdown = nan"),
        (lambda _error, _retries: -1, "countdown = -1"),
        (lambda _error, _retries: 10**400, "countdown = "),
    ],
)
def test_a_delay_that_is_none_ends_the_operation(
    app: Celery, asking: dict[str, Any], delay: Callable[..., Any], told: str
) -> None:
    """C12: at once, and it says what is wrong."""
    operation = run_here(failing(app, OSError("away"), retry_delay=delay, **asking))
    assert operation.state == "FAILURE"
    assert isinstance(operation.result, EnqueueError)
    assert told in str(operation.result)


@ASKING
def test_what_is_not_retryable_ends_at_once(app: Celery, asking: dict[str, Any]) -> None:
    operation = run_here(failing(app, Declined("card"), **asking))
    assert operation.state == "FAILURE"
    assert isinstance(operation.result, Declined)


@pytest.mark.parametrize("given", [True, False])
def test_a_retry_for_what_is_not_retryable(app: Celery, given: bool) -> None:
    """It is found where the retry names none, too."""

    @app.task(base=DurableTask, bind=True, shared=False)
    def fails(self: Any) -> None:
        try:
            raise Declined("card")
        except Declined as error:
            self.retry(throw=False, **({"exc": error} if given else {}))

    operation = run_here(fails)
    assert operation.state == "FAILURE"
    assert isinstance(operation.result, Declined)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"retry_delay": 5}, "retry_delay = 5: give a callable"),
        ({"retry_delay": timedelta}, "retry_delay = <class 'datetime.timedelta'>: give a callable"),
        ({"retry_delay": lambda: 5}, r"it is called with \(error, retries\): too many positional"),
        ({"retry_delay": _raises, "retry_backoff": True}, "retry_backoff = True says it too"),
    ],
)
def test_a_wrong_retry_delay_is_refused_where_it_stands(app: Celery, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        durable_task(**options)(_body)
    with pytest.raises(ConfigurationError, match=told):
        app.task(base=DurableTask, shared=False, name="wrong", **options)(_body).delay()


def _body() -> None:
    """Does nothing."""
