"""What a task declares is checked where it is declared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery, Task

from celery_durable import ConfigurationError, DurableTask, EnqueueError, durable_task
from celery_durable.declaration import Resolved


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("billing", set_as_current=False)
    yield app
    app.close()


def body(tenant: str, workflow: str = "wf", amount: int = 1) -> None: ...


def resolve(app: Celery, *args: Any, **options: Any) -> Resolved:
    task = app.task(base=DurableTask, lazy=False, shared=False, **options)(body)
    return task.declaration.resolve(args, {})


NOT_LIMITS = [True, False, -1, 1.5, 2.0, float("nan"), float("inf"), "5", "", [], 10**9 + 1, b"1"]


@pytest.mark.parametrize("value", NOT_LIMITS)
@pytest.mark.parametrize("option", ["limit", "group_limit"])
def test_limits_that_are_none_are_refused_at_decoration(app: Celery, option: str, value: Any) -> None:
    """E6: refused where they are declared, with the field's name, for both ways to declare a task."""
    with pytest.raises(ConfigurationError, match=rf"billing.body|body: {option} = "):
        resolve(app, "a", account="x", **{option: value})
    with pytest.raises(ConfigurationError, match=rf"body: {option} = "):
        durable_task(account="x", **{option: value})(body)


@pytest.mark.parametrize("value", NOT_LIMITS)
def test_limits_that_a_callable_gives_are_refused_at_the_call(app: Celery, value: Any) -> None:
    """E6"""
    with pytest.raises(EnqueueError, match=r"body: limit = "):
        resolve(app, "a", account="x", limit=lambda *args: value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"account": "{tennant}"}, "did you mean 'tenant'"),
        ({"account": ""}, "it is empty"),
        ({"account": 5}, "account = 5: give a text"),
        ({"group": "{zzz}"}, "no argument of the task"),
        ({"mutex": 1}, "mutex = 1: give True or False"),
        ({"mutex": True, "limit": 2}, "a mutex has limit 1"),
        ({"requeue_after": -1}, "requeue_after = -1"),
        ({"requeue_after": float("nan")}, "requeue_after = nan"),
        ({"requeue_after": "5"}, "requeue_after = '5'"),
        ({"requeue_after": True}, "requeue_after = True"),
        ({"requeue_after": 10**400}, "requeue_after = 1"),
        ({"retention": float("inf")}, "retention = inf"),
        ({"retention": timedelta(seconds=-1)}, "retention = "),
        ({"max_worker_losses": 1.0}, "max_worker_losses = 1.0"),
        ({"max_worker_losses": -1}, "max_worker_losses = -1"),
        ({"max_worker_losses": True}, "max_worker_losses = True"),
        ({"acount": "x"}, "acount = 'x': there is no such option, did you mean 'account'"),
        ({"max_worker_loss": 1}, "did you mean 'max_worker_losses'"),
        ({"colour": "red"}, "an attribute of your own belongs on the task's base class"),
        ({"rate": "5/s"}, "rate = '5/s': there is no such option"),
    ],
)
def test_wrong_options_are_refused_by_name(app: Celery, options: dict[str, Any], says: str) -> None:
    """E6, and an unknown option is never ignored."""
    for declare in (
        lambda: app.task(base=DurableTask, lazy=False, shared=False, **options)(body),
        lambda: durable_task(**options)(body),
    ):
        with pytest.raises(ConfigurationError) as caught:
            declare()
        assert says in str(caught.value)


def test_celerys_own_options_and_those_of_a_base_are_welcome(app: Celery) -> None:
    """D9: custom bases with attributes of their own."""

    class Mine(DurableTask[..., Any]):
        abstract = True
        colour = "blue"

    def bound(self: Any, tenant: str) -> None: ...

    task = app.task(
        base=Mine,
        lazy=False,
        shared=False,
        colour="red",
        bind=True,
        autoretry_for=(ValueError,),
        retry_backoff=2,
        max_retries=5,
        time_limit=30,
        acks_late=True,
        ignore_result=True,
        rate_limit="5/s",
        account="{tenant}",
    )(bound)
    assert task.colour == "red"
    assert task.declaration.resolve(("a",), {}).account == "a"


@pytest.mark.parametrize(
    ("options", "args", "resolved"),
    [
        ({}, ("a",), Resolved()),
        ({"account": "tenant:{tenant}"}, ("acme",), Resolved("tenant:acme")),
        (
            {"account": "{tenant}", "group": "{workflow}", "limit": 5, "group_limit": 2},
            ("a", "w7"),
            Resolved("a", "w7", 5, 2),
        ),
        ({"account": lambda tenant, workflow="x": tenant + workflow}, ("a",), Resolved("ax")),
        ({"account": "x", "mutex": True}, ("a",), Resolved("x", mutex=True)),
        ({"account": "x", "limit": 0}, ("a",), Resolved("x", limit=0)),
        ({"account": "x", "limit": lambda tenant, *rest: len(tenant)}, ("abc",), Resolved("x", limit=3)),
        ({"account": "x", "limit": lambda *_: None, "group_limit": lambda *_: None}, ("abc",), Resolved("x")),
    ],
)
def test_resolving_a_call(app: Celery, options: dict[str, Any], args: tuple[Any, ...], resolved: Resolved) -> None:
    """E1: where no limit is declared, none is sent: the holder says 1."""
    assert resolve(app, *args, **options) == resolved


def test_account_and_group_of_one_call(app: Celery) -> None:
    declaration = app.task(base=DurableTask, lazy=False, shared=False, account="{tenant}")(body).declaration
    assert declaration.resolve(("a",), {}, account="b", group="g") == Resolved("b", "g")
    for wrong in ("", 5):
        with pytest.raises(EnqueueError, match=r"body: account = "):
            declaration.resolve(("a",), {}, account=wrong)
        with pytest.raises(EnqueueError, match=r"body: group = "):
            declaration.resolve(("a",), {}, group=wrong)


@pytest.mark.parametrize("options", [{"limit": 5}, {"group": "{workflow}"}, {"group_limit": 1}, {"mutex": True}])
def test_a_limit_without_an_account_limits_nothing_and_is_refused(app: Celery, options: dict[str, Any]) -> None:
    with pytest.raises(EnqueueError, match=f"{next(iter(options))} is given, but the call has no account"):
        resolve(app, "a", **options)


@pytest.mark.parametrize("wrong", [None, "", 5])
def test_what_a_callable_gives_is_checked(app: Celery, wrong: Any) -> None:
    with pytest.raises(EnqueueError, match=r"body: account = "):
        resolve(app, "a", account=lambda *args: wrong)


def test_a_callable_that_raises(app: Celery) -> None:
    def account(tenant: str) -> str:
        raise KeyError(tenant)

    with pytest.raises(EnqueueError, match=r"body: account: its callable raised KeyError"):
        resolve(app, "a", account=account)


def test_class_based_tasks(app: Celery) -> None:
    """D9"""

    class Charge(DurableTask[..., Any]):
        name = "charge"
        account = "tenant:{tenant}"
        limit = 3
        helper = "not an option, and none of ours to refuse"

        def run(self, tenant: str) -> None: ...

    task = app.register_task(Charge())
    assert task.declaration.resolve(("acme",), {}) == Resolved("tenant:acme", limit=3)
    with pytest.raises(ConfigurationError, match=r"limit = -3"):

        class Wrong(Charge):
            limit = -3


def test_as_the_task_class_of_a_whole_app() -> None:
    """D9"""
    app = Celery("billing", task_cls=DurableTask, set_as_current=False)
    task = app.task(lazy=False, shared=False, account="{tenant}", limit=2)(body)
    assert isinstance(task, DurableTask)
    assert task.declaration.resolve(("acme",), {}) == Resolved("acme", limit=2)
    app.close()


def test_task_annotations_are_checked_too(app: Celery) -> None:
    app.conf.task_annotations = {"annotated": {"limit": True}}
    with pytest.raises(ConfigurationError, match=r"annotated: limit = True"):
        app.task(base=DurableTask, name="annotated", account="x", lazy=False, shared=False)(body)


def test_a_base_that_is_not_durable() -> None:
    with pytest.raises(ConfigurationError, match=r"base = .*derives from celery_durable.DurableTask"):
        durable_task(base=Task)(body)


def test_cooperative_with_other_bases(app: Celery) -> None:
    """D9: every hook reaches the classes beside it."""
    seen: list[str] = []

    class Beside:
        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            seen.append("subclass")

        @classmethod
        def on_bound(cls, app: Celery) -> None:
            super().on_bound(app)  # type: ignore[misc]
            seen.append("bound")

        def apply_async(self, *args: Any, **kwargs: Any) -> Any:
            seen.append("apply")
            return super().apply_async(*args, **kwargs)  # type: ignore[misc]

    class Under(Task):
        abstract = True

        def apply_async(self, *args: Any, **kwargs: Any) -> Any:
            seen.append("under")
            return super().apply_async(*args, **kwargs)

    class Both(Beside, DurableTask[..., Any], Under):  # type: ignore[misc]
        abstract = True

    seen.clear()
    app.conf.task_always_eager = True
    task = app.task(base=Both, lazy=False, shared=False, name="both")(body)
    task.delay("acme")
    assert seen == ["subclass", "bound", "apply", "under"]


def test_shared_form_is_bound_to_the_app_that_uses_it(app: Celery) -> None:
    @durable_task(name="shared.charge", account="{tenant}", bind=True)
    def shared(self: Any, tenant: str) -> str:
        return tenant

    app.finalize()
    assert app.tasks["shared.charge"].declaration.resolve(("acme",), {}).account == "acme"


def typed(charge: Callable[[str], int]) -> None:
    """The types that a user's checker sees: mypy reads this file."""
    task = durable_task(charge)
    task.delay("acme").get() + 1
    task.delay(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("account", ["{tenant}", lambda tenant, workflow="x": tenant])
def test_a_call_without_an_argument_is_refused_as_that(app: Celery, account: Any) -> None:
    """Not as a fault of the callable."""
    with pytest.raises(TypeError, match=r"body\(\): missing a required argument: 'tenant'"):
        resolve(app, account=account)
