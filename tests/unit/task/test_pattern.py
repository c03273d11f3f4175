"""A message that is filled in is the one that Celery would have built, whatever the call."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import pytest
from celery import Celery, Task, signals
from celery._state import _task_stack
from hypothesis import given, settings
from hypothesis import strategies as st
from kombu import Exchange, Queue

from celery_durable import DurableTask, message
from celery_durable.errors import EnqueueError
from celery_durable.message import CapturedMessage
from celery_durable.pattern import Patterns

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "queue": st.sampled_from(["celery", "other"]),
        "priority": st.integers(0, 9),
        "serializer": st.sampled_from(["json", "pickle"]),
        "compression": st.sampled_from(["gzip", "zlib"]),
        "ignore_result": st.booleans(),
        "time_limit": st.integers(1, 9),
        "countdown": st.sampled_from([0, 1, 2.5]),
        "link": st.none(),
        "shadow": st.none() | st.just("another name"),
        "headers": st.just({"own": 1}),
        "expires": st.just(60),
    },
)


@pytest.fixture
def app() -> Celery:
    return Celery("billing", broker="memory://", set_as_current=False)


@pytest.fixture
def task(app: Celery) -> DurableTask[..., Any]:
    @app.task(base=DurableTask, name="any", shared=False)
    def anything(*args: Any, **kwargs: Any) -> None: ...

    return anything  # type: ignore[no-any-return]


class Counted:
    """How many messages Celery built."""

    def __init__(self) -> None:
        self.built = 0

    def __call__(self, *args: Any, **kwargs: Any) -> CapturedMessage:
        self.built += 1
        return capture(*args, **kwargs)


capture = message.capture


@pytest.fixture
def counted() -> Iterator[Counted]:
    counted = Counted()
    with patch.object(message, "capture", counted):
        yield counted


def taken(task: DurableTask[..., Any], *args: Any, task_id: str = "one", **options: Any) -> CapturedMessage:
    return task._capture(args, {}, task_id, options)


def whole_way(task: Any, args: Any, kwargs: Any, task_id: str, **options: Any) -> dict[str, Any]:
    return asdict(capture(task, args, kwargs, send=Task.apply_async.__get__(task), task_id=task_id, **options))


@settings(deadline=None)
@given(calls=st.lists(st.tuples(st.lists(VALUES, max_size=9), st.dictionaries(st.text(max_size=5), VALUES), OPTIONS)))
def test_it_is_the_message_that_celery_builds(calls: list[tuple[list[Any], dict[str, Any], dict[str, Any]]]) -> None:
    app = Celery("billing", broker="memory://", set_as_current=False)

    @app.task(base=DurableTask, name="any", shared=False)
    def anything(*args: Any, **kwargs: Any) -> None: ...

    # Twice: the first of each kind is learnt.
    for number, (args, kwargs, options) in enumerate(calls * 2):
        found = anything._capture(tuple(args), kwargs, f"id-{number}", dict(options))
        assert asdict(found) == whole_way(anything, tuple(args), kwargs, f"id-{number}", **options)


def test_celery_builds_the_first_only(task: DurableTask[..., Any], counted: Counted) -> None:
    for number in range(5):
        assert taken(task, number, "x", task_id=str(number)).headers["argsrepr"] == f"({number}, 'x')"
        assert taken(task, number, priority=3, countdown=number).priority == 3
    assert counted.built == 2


@pytest.mark.parametrize("name", ["before_task_publish", "after_task_publish", "task_sent"])
def test_signals_fire_for_each_call(task: DurableTask[..., Any], name: str) -> None:
    taken(task)
    seen: list[Any] = []

    def receiver(**fields: Any) -> None:
        seen.append(fields["sender"])

    signal = getattr(signals, name)
    signal.connect(receiver)
    try:
        taken(task)
        taken(task)
    finally:
        signal.disconnect(receiver)
    assert seen == ["any", "any"]


def test_a_router_that_is_code_is_asked_for_each_call(app: Celery, task: DurableTask[..., Any]) -> None:
    def route(name: str, args: Any, kwargs: Any, options: Any, task: Any = None, **_: Any) -> Any:
        return {"queue": f"q{args[0]}"} if args else None

    app.conf.task_routes = (route,)
    assert [taken(task, number).queue for number in (1, 2, 1)] == ["q1", "q2", "q1"]


def test_routes_that_change_are_obeyed(app: Celery, task: DurableTask[..., Any]) -> None:
    assert [taken(task).queue for _ in range(2)] == ["celery", "celery"]
    app.conf.update(task_routes={"any": {"queue": "slow"}})
    assert [taken(task).queue for _ in range(2)] == ["slow", "slow"]


def test_a_queue_that_is_declared_anew_is_obeyed(app: Celery, task: DurableTask[..., Any]) -> None:
    assert [taken(task, queue="jobs").publish["exchange"] for _ in range(2)] == ["", ""]
    app.amqp.queues.add(Queue("jobs", Exchange("jobs", type="topic"), routing_key="jobs.all"))
    assert [taken(task, queue="jobs").publish["exchange"] for _ in range(2)] == ["jobs", "jobs"]


def test_what_instruments_celery_sees_each_call(app: Celery, task: DurableTask[..., Any]) -> None:
    """Tracing libraries wrap ``apply_async`` or ``send_task``, before or after the first call."""
    taken(task)
    seen: list[str] = []
    apply_async, send_task = Task.apply_async, app.send_task

    def traced_apply(self: Any, *args: Any, **options: Any) -> Any:
        seen.append("apply_async")
        return apply_async(self, *args, **options)

    def traced_send(*args: Any, **options: Any) -> Any:
        seen.append("send_task")
        return send_task(*args, **options)

    with patch.object(Task, "apply_async", traced_apply):
        taken(task)
        taken(task)
    with patch.object(app, "send_task", traced_send):
        taken(task)
        taken(task)
    assert seen == ["apply_async", "apply_async", "send_task", "send_task"]


def test_a_parent_is_named(app: Celery, task: DurableTask[..., Any]) -> None:
    taken(task)

    @app.task(name="parent", shared=False)
    def parent() -> None: ...

    parent.push_request(id="p", root_id="r", called_directly=False, is_eager=False)
    _task_stack.push(parent)
    try:
        headers = [taken(task).headers for _ in range(2)]
    finally:
        _task_stack.pop()
        parent.pop_request()
    assert [(one["parent_id"], one["root_id"]) for one in headers] == [("p", "r")] * 2


def test_a_child_process_gives_its_own_name(task: DurableTask[..., Any]) -> None:
    taken(task)
    assert str(os.getpid()) in taken(task).headers["origin"]
    with patch.object(os, "getpid", return_value=7):
        assert taken(task).headers["origin"].startswith("gen7@")


def test_what_is_wrong_is_refused_as_ever(task: DurableTask[..., Any], app: Celery) -> None:
    @app.task(base=DurableTask, name="one", shared=False)
    def one(first: int) -> None: ...

    one._capture((1,), {}, "a", {})
    with pytest.raises(TypeError):
        one._capture((), {}, "b", {})
    taken(task, priority=1)
    for options in (
        {"priority": True},
        {"countdown": -1},
        {"countdown": "x"},
        {"countdown": False},
        {"countdown": ""},
        {"no_such": 1},
    ):
        with pytest.raises(EnqueueError):
            taken(task, **options)
    for wrong in ("", "a\0b", 5):
        with pytest.raises(EnqueueError, match="task_id"):
            taken(task, task_id=wrong)  # type: ignore[arg-type]
    with pytest.raises(EnqueueError, match="serialised"):
        taken(task, object())


def test_no_more_are_kept_than_are_of_use(task: DurableTask[..., Any], counted: Counted) -> None:
    patterns = task._patterns
    assert isinstance(patterns, Patterns)
    for number in range(300):
        taken(task, queue=f"q{number}")
    assert len(patterns._known) <= 100


def test_a_task_that_is_a_class_is_filled_in_too(app: Celery, counted: Counted) -> None:
    """Celery checks the arguments of functions only."""

    class Charge(DurableTask[..., Any]):
        name = "charge"

        def run(self, number: int) -> int:
            return number

    charge: Any = app.register_task(Charge())
    for number in range(3):
        captured = charge._capture((number,), {}, f"id-{number}", {})
        assert asdict(captured) == whole_way(charge, (number,), {}, f"id-{number}")
    assert counted.built == 1


def test_a_kind_that_is_known_is_learnt_anew_though_there_are_many(
    task: DurableTask[..., Any], counted: Counted
) -> None:
    for number in range(100):
        taken(task, queue=f"q{number}")
    with patch.object(os, "getpid", return_value=7):
        taken(task, queue="q5")
        built = counted.built
        taken(task, queue="q5")
    assert counted.built == built
