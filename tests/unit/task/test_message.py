"""Messages are caught as Celery makes them, without a broker or a result backend."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery, Task, signals
from kombu import Exchange, Queue

from celery_durable.errors import EnqueueError
from celery_durable.message import ATTEMPT_HEADER, OUR_HEADERS, RUN_HEADER, CapturedMessage, capture

NOWHERE = "redis://127.0.0.1:1/0"


@pytest.fixture
def app() -> Iterator[Celery]:
    """C19, C24: neither its broker nor its result backend can be reached."""
    app = Celery("billing", broker=NOWHERE, backend=NOWHERE, set_as_current=False)
    yield app
    app.close()


@pytest.fixture
def task(app: Celery) -> Task:
    @app.task(name="charge", shared=False, lazy=False)
    def charge(tenant: str, amount: int = 0) -> None: ...

    return charge


def caught(task: Task, *args: Any, **options: Any) -> CapturedMessage:
    return capture(task, args, options.pop("kwargs", None), send=task.apply_async, **options)


def test_it_is_the_message_that_celery_would_send(app: Celery, task: Task) -> None:
    """C19, C24, D13"""
    app.conf.task_routes = {"charge": {"queue": "money"}}
    message = caught(task, "acme", kwargs={"amount": 5}, task_id="order-81", priority=3, headers={"trace": "abc"})
    assert (message.id, message.task, message.queue, message.priority) == ("order-81", "charge", "money", 3)
    assert (message.content_type, message.content_encoding) == ("application/json", "utf-8")
    args, kwargs, embedded = json.loads(message.body)
    assert (args, kwargs) == (["acme"], {"amount": 5})
    assert embedded == {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    assert message.headers["id"] == message.properties["correlation_id"] == "order-81"
    assert message.headers["trace"] == "abc"
    assert message.headers["argsrepr"] == "('acme',)"
    assert message.headers["ignore_result"] is False
    assert message.publish == {"exchange": "", "routing_key": "money", "delivery_mode": 2, "priority": 3}


def test_queues_with_exchanges(app: Celery, task: Task) -> None:
    """D13"""
    app.conf.task_queues = [Queue("money", Exchange("topics", type="topic"), routing_key="money.#")]
    message = caught(task, "a", queue="money", routing_key="money.eu", compression="gzip", serializer="pickle")
    assert message.queue == "money"
    assert message.publish["exchange"] == "topics"
    assert message.publish["routing_key"] == "money.eu"
    assert message.publish["compression"] == "gzip"
    assert message.content_type == "application/x-python-serialize"


def test_our_headers_of_a_parent_are_stripped(task: Task) -> None:
    given = dict.fromkeys(OUR_HEADERS, 3) | {"mine": 1}
    headers = caught(task, "a", headers=given).headers
    assert headers["mine"] == 1
    assert not set(OUR_HEADERS) & set(headers)
    assert {ATTEMPT_HEADER, RUN_HEADER} < set(OUR_HEADERS)


def test_celerys_signals_fire_and_may_add_headers(task: Task) -> None:
    """D13: this is how trace context gets into a message."""

    def add(headers: dict[str, Any], **_: Any) -> None:
        headers["traceparent"] = "00-1"

    signals.before_task_publish.connect(add)
    try:
        assert caught(task, "a").headers["traceparent"] == "00-1"
    finally:
        signals.before_task_publish.disconnect(add)


def test_the_sent_event_is_no_second_message(app: Celery, task: Task) -> None:
    app.conf.task_send_sent_event = True
    assert caught(task, "acme", task_id="x").id == "x"


def test_times_go_to_sql(task: Task) -> None:
    """D5: the message itself is due when it arrives."""
    message = caught(task, "a", countdown=3, expires=60)
    assert (message.eta_delay_ms, message.eta_at_ms) == (3_000, None)
    assert (message.expires_delay_ms, message.expires_at_ms) == (60_000, None)
    assert message.headers["eta"] is message.headers["expires"] is None
    assert "expiration" not in message.properties
    at = datetime(2026, 2, 1, 12, tzinfo=UTC)
    for eta in (at, at.astimezone(timezone(timedelta(hours=5))), at.replace(tzinfo=None), at.isoformat()):
        message = caught(task, "a", eta=eta, expires=eta)
        assert message.eta_at_ms == message.expires_at_ms == round(at.timestamp() * 1000)
    assert caught(task, "a", countdown=0).eta_delay_ms is None
    assert caught(task, "a", countdown=timedelta(minutes=1)).eta_delay_ms == 60_000


def test_a_tasks_own_expiry_can_be_taken_away(app: Celery) -> None:
    task = app.task(name="brief", shared=False, lazy=False, expires=5, ignore_result=True)(lambda_body)
    assert caught(task).expires_delay_ms == 5_000
    assert caught(task, expires=None).expires_delay_ms is None
    assert caught(task).headers["ignore_result"] is True
    assert caught(task, ignore_result=False).headers["ignore_result"] is False


def lambda_body() -> None: ...


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"countdown": -1}, "countdown = -1: give 0 or more seconds"),
        ({"countdown": float("nan")}, "countdown = nan: give 0 or more seconds"),
        ({"countdown": float("inf")}, "countdown = inf: further off than ten years"),
        ({"countdown": 10**400}, "further off than ten years"),
        ({"countdown": "5"}, "countdown = '5'"),
        ({"countdown": True}, "countdown = True: give seconds"),
        ({"eta": 5}, "eta = 5: give a datetime"),
        ({"eta": datetime(2200, 1, 1, tzinfo=UTC)}, "further off than ten years"),
        ({"eta": datetime(2026, 1, 1, tzinfo=UTC), "countdown": 1}, "give one of them"),
        ({"expires": -5}, "expires = -5"),
        ({"expires": "soon"}, "expires = 'soon': not an ISO 8601 time"),
        ({"priorty": 3}, "priorty = 3: there is no such option, did you mean 'priority'"),
        ({"zzz": 3}, "data of your own goes into headers"),
        ({"retry_policy": {}}, "retry_policy = {}: an operation cannot carry it"),
        ({"retry": False}, "retry = False: an operation cannot carry it"),
        ({"connection": object()}, "connection = "),
        ({"declare": []}, "declare = []: an operation cannot carry it; give queue"),
        ({"timeout": 5}, "publish_deadline_s"),
        ({"task_id": ""}, "task_id = ''"),
        ({"task_id": 5}, "task_id = 5"),
        ({"task_id": "x" * 256}, "1 to 255 characters"),
        ({"task_id": "a\0"}, "NUL"),
        ({"priority": "high"}, "priority = 'high': give a whole number"),
        ({"priority": True}, "priority = True"),
        ({"headers": {"a": object()}}, "headers['a'] = <object"),
        ({"headers": {"a": float("nan")}}, "headers['a'] = nan"),
        ({"message_id": b"1"}, "message_id = b'1'"),
        ({"task_id": "\ud800"}, "task_id = '\\ud800'"),
        ({"retries": "x"}, "retries = 'x': give a whole number from 0 up"),
        ({"retries": -1}, "retries = -1"),
        ({"retries": 2**31}, "retries = 2147483648"),
        ({"time_limit": "1"}, "time_limit = '1': give seconds from 0 up"),
        ({"soft_time_limit": float("nan")}, "soft_time_limit = nan"),
        ({"time_limit": -1}, "time_limit = -1"),
        ({"link": "x"}, "link = 'x': give signatures"),
        ({"link_error": [5]}, "link_error = [5]: give signatures"),
        ({"chain": {"a": 1}}, "chain = {'a': 1}: give signatures"),
        ({"queue": 5}, "queue = 5: give a name"),
        ({"queue": ["x"]}, "queue = ['x']: give a name"),
        ({"queue": "a\0b"}, "queue = 'a\\x00b': give a name"),
        ({"queue": "x" * 256}, "at most 255 bytes"),
        ({"exchange": 5}, "exchange = 5: give a name"),
        ({"routing_key": b"x"}, "routing_key = b'x': give a name"),
        ({"compression": "nope"}, "compression = 'nope': give the name of a compression"),
        ({"delivery_mode": "durable"}, "delivery_mode = 'durable': give 'persistent' or 'transient'"),
        ({"serializer": "x" * 5_000_000}, "serializer = 'xxx"),
        ({"shadow": 5}, "shadow = 5: give a text"),
        ({"timestamp": "now"}, "timestamp = 'now': give a whole number"),
        ({"headers": 5}, "headers = 5: give a dictionary"),
        ({"headers": {1: 2}}, "headers = {1: 2}: give a dictionary"),
        ({"headers": {"id": "mine"}}, "headers['id']: Celery writes this header itself"),
        ({"stamped_headers": 5}, "stamped_headers = 5: give a list"),
        ({"stamped_headers": ["x"]}, "the call has no 'x'"),
        ({"countdown": "x" * 5_000_000}, "countdown = 'xxx"),
        ({"connection": "x" * 5_000_000}, "connection = 'xxx"),
    ],
)
def test_options_are_carried_or_refused_by_name(task: Task, options: dict[str, Any], says: str) -> None:
    """D1 (of an enqueue): never ignored."""
    with pytest.raises(EnqueueError) as caught_error:
        caught(task, "a", **options)
    assert says in str(caught_error.value)
    assert str(caught_error.value).startswith("charge: ")
    assert len(str(caught_error.value)) < 400


def test_what_the_task_itself_declares_is_checked_too(app: Celery) -> None:
    task = app.task(name="wrong", shared=False, lazy=False, compression="nope")(lambda_body)
    with pytest.raises(EnqueueError, match="wrong: compression = 'nope'"):
        caught(task)


def test_options_that_say_what_holds_anyway(task: Task) -> None:
    assert caught(task, "a", retry=True, producer=object(), connection=None, redelivered=False).task == "charge"


def test_arguments_that_cannot_be_serialised(task: Task) -> None:
    with pytest.raises(EnqueueError, match="charge: its arguments, links or chain cannot be serialised by 'json'"):
        caught(task, object())


def test_arguments_that_do_not_fit_the_task(task: Task) -> None:
    with pytest.raises(TypeError):
        caught(task)


def test_the_digest_is_of_the_task_and_its_arguments_alone(app: Celery, task: Task) -> None:
    """A1: what "the same body" means."""
    same = [
        caught(task, kwargs={"tenant": {"a": 1, "b": 2}, "amount": 1}),
        caught(task, kwargs={"amount": 1, "tenant": {"b": 2, "a": 1}}),
        caught(
            task, kwargs={"amount": 1, "tenant": {"b": 2, "a": 1}}, countdown=5, queue="q", link=task.s(), priority=1
        ),
        caught(task, kwargs={"amount": 1, "tenant": {"b": 2, "a": 1}}, serializer="pickle"),
    ]
    assert len({message.digest for message in same}) == 1
    other = app.task(name="other", shared=False, lazy=False)(body_of_other)
    different = [caught(task, "a"), caught(task, "b"), caught(task, "a", 1), caught(other, "a")]
    assert len({message.digest for message in (*different, same[0])}) == 5


def body_of_other(tenant: str) -> None: ...


def test_links_chains_and_stamps_are_carried(task: Task) -> None:
    """D4, as far as the message goes."""
    message = caught(task, "a", link=task.s("b"), link_error=task.s("c"), stamped_headers=["colour"], colour="red")
    embedded = json.loads(message.body)[2]
    assert embedded["callbacks"][0]["args"] == ["b"]
    assert embedded["errbacks"][0]["args"] == ["c"]
    assert message.headers["stamps"] == {"colour": "red"}
