"""The task class: ``@app.task(base=DurableTask, account="tenant:{tenant}", limit=5)``, and its typed form."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Generic, Literal, ParamSpec, TypeVar, cast, overload

from celery import Task, shared_task
from kombu.utils.uuid import uuid

from celery_durable import enqueue, message, results, spool
from celery_durable.declaration import OPTIONS, Declaration, RetryDelay, check_options, declare, signature_of
from celery_durable.errors import ConfigurationError, EnqueueError, NonRetryable
from celery_durable.pattern import Patterns
from celery_durable.results import DurableAsyncResult, durable_backend
from celery_durable.store.operations import BATCH_ROWS
from celery_durable.worker import boot
from celery_durable.worker.retry import is_retry, retry_delay_s, stage_retry
from celery_durable.worker.seam import WorkerSeam

if TYPE_CHECKING:
    from celery import Celery
    from celery.result import EagerResult

    from celery_durable.store.operations import NewOperation

spool.register()  # whoever loads a durable task may connect to the folder broker
results.register()
boot.register()

P = ParamSpec("P")
R = TypeVar("R")

KeyOption = str | Callable[..., str] | None
LimitOption = int | Callable[..., int | None] | None


class DurableTask(WorkerSeam, Task, Generic[P, R]):
    """Base class of tasks whose calls are durable operations.

    A call is one row in the service's own database, written in the caller's transaction (:func:`using`). It is run
    until it ends; with an ``account``, only while it holds one of the account's permits. Everything else is Celery's:
    retries, time limits, routing, callbacks, signals.
    """

    abstract = True

    account: KeyOption = None
    """The account whose permits calls need: a template over the call's arguments (``"tenant:{tenant}"``), or a callable
    with the task's signature. None: calls need no permit, unless ``apply_async(account=)`` gives one."""
    group: KeyOption = None
    """The group inside the account, in the same way."""
    limit: LimitOption = None
    """How many operations of the account may hold a permit at once, as far as this task knows: a number, or a callable
    with the task's signature. None, also from the callable: the task declares none, and where nobody does the limit is
    1."""
    group_limit: LimitOption = None
    """The same for the group."""
    mutex: bool | None = None
    """The account's limit is 1, and no rule or command can raise it."""
    requeue_after: float | timedelta | None = None
    """Seconds. A retry delay of at least this long gives the permit back. None: the setting."""
    max_worker_losses: int | None = None
    """Lost workers after which the operation fails; 0: it never runs again. None: the setting."""
    retention: float | timedelta | None = None
    """Seconds that the ended operation and its result are kept. None: the setting."""
    retry_delay: RetryDelay | None = None
    """A callable ``(error, retries)`` that gives the seconds until a retry for which neither ``self.retry(countdown=)``
    nor ``eta`` nor ``retry_kwargs`` says them; where it gives None, ``default_retry_delay`` does. ``retries`` is 0 for
    the first. Not together with ``retry_backoff``."""

    _durable_declaration: ClassVar[Declaration | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = cls.__dict__
        cls._durable_declaration = None
        if own.get("_decorated"):
            check_options(_name_of(cls), _decorator_options(own), cls.__bases__[0])
        if getattr(cls, "run", None) is not Task.run and not own.get("abstract", False):
            cls._durable_declaration = _declare(cls)

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Checks once more: ``task_annotations`` may have changed what the task declares."""
        super().on_bound(app)
        cls._durable_declaration = None
        if cls.run is not Task.run:
            cls._durable_declaration = _declare(cls)

    @property
    def declaration(self) -> Declaration:
        """What the task declares beyond Celery's own options."""
        cls = type(self)
        found = cls.__dict__.get("_durable_declaration")
        if found is None:
            found = cls._durable_declaration = _declare(cls)
        return cast(Declaration, found)

    @property
    def run_token(self) -> str | None:
        """The fencing token of the attempt that runs in this thread: another one for each attempt. None outside one.

        An outside system that keeps the newest token of an operation can tell a worker that was frozen past
        ``alive_until`` from its successor.
        """
        run = getattr(self.request, message.RUN_HEADER, None)
        return run["token"] if isinstance(run, dict) else None

    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def delay(self, *args: P.args, **kwargs: P.kwargs) -> DurableAsyncResult[R]:
        """Enqueues a call: ``apply_async(args, kwargs)``."""
        return cast("DurableAsyncResult[R]", super().delay(*args, **kwargs))

    def apply_async(
        self,
        args: tuple[Any, ...] | list[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        *,
        account: str | None = None,
        group: str | None = None,
        **options: Any,
    ) -> DurableAsyncResult[R]:
        """Enqueues a call. Takes Celery's options, and ``account`` and ``group`` for this call alone.

        It inserts rows and does nothing else: it takes no lock that another transaction may wait for, and needs
        neither the broker nor the result backend. The same ``task_id`` with the same arguments again changes nothing:
        the result says ``duplicate``.

        :raises EnqueueError: an option that an operation cannot carry, an account or group that is empty or no text,
            arguments that cannot be serialised. Nothing was written.
        :raises DuplicateOperationError: the ``task_id`` is another task's, or has other arguments.
        :raises TypeError: ``args`` is no tuple or list, ``kwargs`` no dictionary, or they do not fit the signature.
        """
        _check_arguments(self.name, args, kwargs)
        options.update(link=link, link_error=link_error, shadow=shadow)
        args = tuple(args) if isinstance(args, list) else args
        app = self._get_app()
        if app.conf.task_always_eager:
            self.declaration.resolve(args or (), kwargs or {}, account=account, group=group)
            producer = message.NoProducer() if producer is None else producer
            eager: Any = super().apply_async(args, kwargs, task_id=task_id, producer=producer, **options)
            eager.duplicate = False
            return cast("DurableAsyncResult[R]", eager)
        operation_id = uuid() if task_id is None else task_id
        add_to_parent = options.pop("add_to_parent", True)
        result = self.AsyncResult(operation_id)
        if is_retry(self, operation_id, options.get("retries") or 0):
            captured = self._capture(args, kwargs, operation_id, options)
            stage_retry(self, captured)
        else:
            resolved = self.declaration.resolve(args or (), kwargs or {}, account=account, group=group)
            captured = self._capture(args, kwargs, operation_id, options)
            new = enqueue.new_operation(captured, resolved, self.declaration)
            result.duplicate = enqueue.insert(app, new, own_id=task_id is None)
        result.ignored = captured.headers["ignore_result"]
        parent = app.current_worker_task if add_to_parent else None
        if parent:
            parent.add_trail(result)
        return result

    def retry(
        self,
        args: Any = None,
        kwargs: Any = None,
        exc: BaseException | None = None,
        throw: bool = True,
        eta: Any = None,
        countdown: Any = None,
        max_retries: int | None = None,
        **options: Any,
    ) -> Any:
        """As Celery's, with :attr:`retry_delay`; the settle of this attempt writes it.

        :raises NonRetryable: that is the error to retry for: this attempt was the last.
        :raises EnqueueError: the delay cannot be one, or ``retry_delay`` raised. The operation fails.
        """
        error = exc if isinstance(exc, BaseException) else sys.exc_info()[1]
        if isinstance(error, NonRetryable):
            raise error
        own, retries = self.declaration.retry_delay, self.request.retries or 0
        most = self.max_retries if max_retries is None else max_retries
        is_last = self.request.called_directly or (most is not None and retries >= most)
        if own is not None and eta is None and countdown is None and not is_last:
            countdown = retry_delay_s(self.name, own, error, retries)
        return super().retry(args, kwargs, exc, throw, eta, countdown, max_retries, **options)

    def replace(self, sig: Any) -> Any:
        """Works in eager calls only. As an operation, a task cannot become another one: its account is this one's.

        :raises EnqueueError: the task runs as an operation. It fails, and nothing else was enqueued.
        """
        if self.request.is_eager or self.request.called_directly:
            return super().replace(sig)
        raise EnqueueError(
            f"{self.name}: replace({sig!r:.100}): an operation cannot become another task; enqueue that one as this "
            "one's link or as the next step of its chain, or call it and return"
        )

    def enqueue_many(
        self,
        calls: Iterable[Any],
        *,
        batch_rows: int = BATCH_ROWS,
        progress: Callable[[int], object] | None = None,
    ) -> enqueue.Enqueued:
        """Enqueues many calls in batches, each a few statements. Of the batches before it only the IDs are in memory.

        Where :func:`using` is in force the batches are part of the caller's transaction, which is to be rolled back
        after an error. Else each batch is a transaction of its own, and an error tells how many operations the batches
        before it have enqueued; with a ``task_id`` in each call it can simply be run again. In an ``async with using``
        all of it waits in memory, and nobody knows yet which calls are duplicates.

        :param calls: any iterable, a generator too, of tuples of positional arguments, or of this task's signatures:
            ``charge.s("acme", amount=12).set(task_id="order-81", account="acme", countdown=10)``.
        :param batch_rows: calls in a batch, at most.
        :param progress: called after each batch with the number of calls that it and those before it had.
        :raises EnqueueError, DuplicateOperationError: as :meth:`apply_async`; nothing of the present batch was written.
        """
        if self._get_app().conf.task_always_eager:
            ids = tuple(self._apply_call(call).id for call in calls)
            if progress is not None:
                progress(len(ids))
            return enqueue.Enqueued(ids, ())
        return enqueue.enqueue_many(self, calls, batch_rows=batch_rows, progress=progress)

    def prepare_call(self, call: Any) -> NewOperation:
        """The rows of one item of :meth:`enqueue_many`."""
        args, kwargs, options = self._read_call(call)
        account, group = options.pop("account", None), options.pop("group", None)
        task_id = options.pop("task_id", None)
        options.pop("add_to_parent", None)
        resolved = self.declaration.resolve(args, kwargs, account=account, group=group)
        captured = self._capture(args, kwargs, uuid() if task_id is None else task_id, options)
        return enqueue.new_operation(captured, resolved, self.declaration)

    def AsyncResult(self, task_id: str, **kwargs: Any) -> DurableAsyncResult[R]:  # noqa: N802 - Celery's name
        """The result of an operation, read from SQL whatever the app's result backend is."""
        app = self._get_app()
        return DurableAsyncResult(task_id, backend=durable_backend(app), task_name=self.name, app=app, **kwargs)

    def _capture(
        self, args: tuple[Any, ...] | None, kwargs: dict[str, Any] | None, operation_id: str, options: dict[str, Any]
    ) -> message.CapturedMessage:
        for name in OPTIONS:
            if name in options:
                raise EnqueueError(
                    f"{self.name}: {name} = {options[name]!r}: it cannot be given for one call; declare it on the task"
                )
        return self._patterns.capture(args, kwargs, send=super().apply_async, task_id=operation_id, **options)

    @cached_property
    def _patterns(self) -> Patterns:
        return Patterns(self)

    def _read_call(self, call: Any) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        if isinstance(call, tuple | list):
            return tuple(call), {}, {}
        if isinstance(call, dict) and "task" in call and "options" in call:  # a signature, maybe as JSON gave it back
            if call["task"] != self.name:
                raise EnqueueError(
                    f"{self.name}: enqueue_many got a signature of {call['task']}: give {self.name}'s own"
                )
            args, kwargs = call.get("args"), call.get("kwargs")
            _check_arguments(self.name, args, kwargs)
            return tuple(args or ()), dict(kwargs or {}), dict(call["options"])
        raise EnqueueError(
            f"{self.name}: enqueue_many got {call!r:.100}: give tuples of arguments, or signatures ({self.name}.s(…))"
        )

    def _apply_call(self, call: Any) -> EagerResult:
        args, kwargs, options = self._read_call(call)
        return self.apply_async(args, kwargs, **options)


def _check_arguments(task: str, args: Any, kwargs: Any) -> None:
    """Refuses ``apply_async("a", 1)``, whose text would be taken apart into its characters."""
    if args is not None and not isinstance(args, tuple | list):
        raise TypeError(
            f"{task}: args = {args!r:.100}: give a tuple or a list of the positional arguments, "
            f"apply_async(({args!r:.100},)), or call .delay({args!r:.100})"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(
            f"{task}: kwargs = {kwargs!r:.100}: give a dictionary of the keyword arguments; positional arguments go "
            "together into args, one tuple: apply_async((first, second))"
        )


def _declare(cls: type[DurableTask[..., Any]]) -> Declaration:
    run = inspect.getattr_static(cls, "run")
    static = isinstance(run, staticmethod | classmethod)
    return declare(
        _name_of(cls),
        signature_of(run.__func__ if static else run, bound=not isinstance(run, staticmethod)),
        _options(cls),
    )


def _options(cls: type[DurableTask[..., Any]]) -> dict[str, Any]:
    """The raw values: a callable given to the decorator is no method, one that a class body defines is static too."""
    options = {name: inspect.getattr_static(cls, name) for name in OPTIONS}
    options["retry_backoff"] = inspect.getattr_static(cls, "retry_backoff", False)
    return {
        name: value.__func__ if isinstance(value, staticmethod | classmethod) else value
        for name, value in options.items()
    }


def _name_of(cls: type) -> str:
    return cls.__dict__.get("name") or f"{cls.__module__}.{cls.__qualname__}"


def _decorator_options(own: Any) -> dict[str, Any]:
    # What Celery itself puts there is no option of the user's.
    made = {"app", "name", "run"}
    return {name: value for name, value in own.items() if name not in made and not name.startswith("_")}


@overload
def durable_task(function: Callable[P, R], /) -> DurableTask[P, R]: ...


@overload
def durable_task(
    *,
    bind: Literal[True],
    account: KeyOption = ...,
    group: KeyOption = ...,
    limit: LimitOption = ...,
    group_limit: LimitOption = ...,
    mutex: bool = ...,
    requeue_after: float | timedelta | None = ...,
    max_worker_losses: int | None = ...,
    retention: float | timedelta | None = ...,
    retry_delay: RetryDelay | None = ...,
    **celery_options: Any,
) -> Callable[[Callable[Concatenate[Any, P], R]], DurableTask[P, R]]: ...


@overload
def durable_task(
    *,
    bind: Literal[False] = ...,
    account: KeyOption = ...,
    group: KeyOption = ...,
    limit: LimitOption = ...,
    group_limit: LimitOption = ...,
    mutex: bool = ...,
    requeue_after: float | timedelta | None = ...,
    max_worker_losses: int | None = ...,
    retention: float | timedelta | None = ...,
    retry_delay: RetryDelay | None = ...,
    **celery_options: Any,
) -> Callable[[Callable[P, R]], DurableTask[P, R]]: ...


def durable_task(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """``shared_task`` for durable tasks, typed, its options checked where it stands.

    Takes the options of :class:`DurableTask` and Celery's own; ``base`` is a class of yours that derives from it.

    :raises ConfigurationError: an unknown option, a value that is none, a field that is no argument of the function.
    """
    decorate = _decorator(options)
    return decorate if function is None else decorate(function)


def _decorator(options: dict[str, Any]) -> Callable[[Callable[..., Any]], Any]:
    base = options.setdefault("base", DurableTask)
    if not (isinstance(base, type) and issubclass(base, DurableTask)):
        raise ConfigurationError(f"base = {base!r:.100}: give a class that derives from celery_durable.DurableTask")

    def decorate(body: Callable[..., Any]) -> Any:
        name = options.get("name") or f"{body.__module__}.{body.__qualname__}"
        check_options(name, options, base)
        declared = {**_options(base), **{key: options[key] for key in (*OPTIONS, "retry_backoff") if key in options}}
        declare(name, signature_of(body, bound=bool(options.get("bind"))), declared)
        return cast(Any, shared_task)(**options)(body)

    return decorate
