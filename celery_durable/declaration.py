"""What a durable task declares beyond Celery's own options: checked once, then resolved for each call.

``limit`` and the like are refused where they are declared (case E6). The account of a call is computed once, when it
is enqueued (case E4).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from inspect import Parameter, Signature
from typing import Any, NoReturn, TypeAlias

from celery_durable.errors import ConfigurationError, DurableError, EnqueueError
from celery_durable.names import nearest
from celery_durable.permits.messages import LIMIT_MAX
from celery_durable.templates import Template, check_key

MAX_WORKER_LOSSES_MAX = 1_000
SECONDS_MAX = 315_360_000.0
"""Ten years."""

OPTIONS = (
    *("account", "group", "limit", "group_limit", "mutex", "requeue_after", "max_worker_losses", "retention"),
    "retry_delay",
)
"""The options of a durable task that Celery does not know."""

_CELERY_OPTIONS = frozenset(
    {
        "queue", "exchange", "exchange_type", "routing_key", "delivery_mode", "priority", "compression", "immediate",
        "mandatory", "autoretry_for", "dont_autoretry_for", "retry_kwargs", "retry_backoff", "retry_backoff_max",
        "retry_jitter", "lazy", "shared", "filter", "bind", "base", "name", "pydantic", "pydantic_strict",
        "pydantic_context", "pydantic_dump_kwargs", "on_bound", "Strategy", "Request",
    }
)  # fmt: skip
"""Options of Celery's decorator that are no attributes of its ``Task``."""

_Error = type[DurableError]

RetryDelay: TypeAlias = Callable[[BaseException | None, int], float | timedelta | None]
"""The error of the attempt that has just failed, and the number of retries before it → seconds until the next one."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """What one call declares: its account and group, and what its limits are as far as this task's code says."""

    account: str | None = None
    group: str = ""
    limit: int | None = None
    group_limit: int | None = None
    mutex: bool = False


@dataclass(frozen=True)
class Declaration:
    """A task's own options, checked. :meth:`resolve` computes those that depend on a call."""

    task: str
    signature: Signature
    account: Template | Callable[..., Any] | None
    group: Template | Callable[..., Any] | None
    limit: int | Callable[..., Any] | None
    group_limit: int | Callable[..., Any] | None
    mutex: bool
    requeue_after_s: float | None
    max_worker_losses: int | None
    retention_s: float | None
    retry_delay: RetryDelay | None = None

    def resolve(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, account: Any = None, group: Any = None
    ) -> Resolved:
        """Account, group and declared limits of one call.

        :param account: given for this call, instead of what the task declares; so is ``group``.
        :raises EnqueueError: empty, of a wrong type, or a limit or group without an account.
        :raises TypeError: the arguments do not fit the task.
        """
        if account is None and self.account is None and group is None and not self._needs_account:
            return Resolved()
        call = _Call(self, args, kwargs)
        resolved_account = call.key("account", account, self.account)
        resolved_group = call.key("group", group, self.group)
        if resolved_account is None:
            declared = "group" if resolved_group is not None else self._needs_account
            raise EnqueueError(
                f"{self.task}: {declared} is given, but the call has no account to count in; declare account (a text "
                "without a field is one account for all calls), or give account to apply_async"
            )
        return Resolved(
            account=resolved_account,
            group=resolved_group or "",
            limit=call.limit("limit", self.limit),
            group_limit=call.limit("group_limit", self.group_limit),
            mutex=self.mutex,
        )

    @property
    def _needs_account(self) -> str | None:
        for name in ("group", "limit", "group_limit"):
            if getattr(self, name) is not None:
                return name
        return "mutex" if self.mutex else None


class _Call:
    """One call's arguments, bound when the first template needs them."""

    def __init__(self, declaration: Declaration, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._declaration = declaration
        self._args = args
        self._kwargs = kwargs
        self._bound: dict[str, Any] | None = None

    def key(self, option: str, given: Any, declared: Template | Callable[..., Any] | None) -> str | None:
        where = f"{self._declaration.task}: {option}"
        if given is not None:
            return check_key(where, given)
        if declared is None:
            return None
        if isinstance(declared, Template):
            return declared.render(self._arguments())
        return check_key(where, self._call(option, declared))

    def limit(self, option: str, declared: int | Callable[..., Any] | None) -> int | None:
        if declared is None or isinstance(declared, int):
            return declared
        value = self._call(option, declared)
        return None if value is None else check_limit(f"{self._declaration.task}: {option}", value, EnqueueError)

    def _call(self, option: str, function: Callable[..., Any]) -> Any:
        self._arguments()  # that the call misses an argument is no fault of the callable
        try:
            return function(*self._args, **self._kwargs)
        except Exception as error:
            raise EnqueueError(
                f"{self._declaration.task}: {option}: its callable raised {type(error).__name__}: {error}; it is "
                "called with the task's own arguments"
            ) from error

    def _arguments(self) -> dict[str, Any]:
        if self._bound is None:
            signature = self._declaration.signature
            try:
                bound = signature.bind(*self._args, **self._kwargs)
            except TypeError as error:
                raise TypeError(f"{self._declaration.task}(): {error}") from None
            bound.apply_defaults()
            self._bound = dict(bound.arguments)
            for name, parameter in signature.parameters.items():
                if parameter.kind is Parameter.VAR_KEYWORD:
                    self._bound = {**self._bound[name], **self._bound}
        return self._bound


def declare(task: str, signature: Signature, options: Mapping[str, Any]) -> Declaration:
    """The declaration of a task, from those of :data:`OPTIONS` that are in ``options``, and Celery's ``retry_backoff``.

    :raises ConfigurationError: naming task, option, value and remedy.
    """

    def option(name: str) -> Any:
        return options.get(name)

    mutex = option("mutex")
    if mutex is not None and not isinstance(mutex, bool):
        _refuse(task, "mutex", mutex, "give True or False")
    limit = _limit_option(task, "limit", option("limit"))
    if mutex and isinstance(limit, int) and limit != 1:
        _refuse(task, "limit", limit, "a mutex has limit 1: leave limit or mutex out")
    return Declaration(
        task=task,
        signature=signature,
        account=_key_option(task, "account", option("account"), signature),
        group=_key_option(task, "group", option("group"), signature),
        limit=limit,
        group_limit=_limit_option(task, "group_limit", option("group_limit")),
        mutex=bool(mutex),
        requeue_after_s=_seconds(task, "requeue_after", option("requeue_after")),
        max_worker_losses=_losses(task, option("max_worker_losses")),
        retention_s=_seconds(task, "retention", option("retention")),
        retry_delay=_retry_delay(task, option("retry_delay"), option("retry_backoff")),
    )


def check_options(task: str, options: Mapping[str, Any], base: type) -> None:
    """Refuses an option of the decorator that neither Celery nor this package nor the base class knows.

    :raises ConfigurationError: naming the option, and the one that was probably meant.
    """
    configured = {name for name, _ in getattr(base, "from_config", ())}
    for name, value in options.items():
        if name.startswith("_") or name in _CELERY_OPTIONS or name in configured or hasattr(base, name):
            continue
        known = {*_CELERY_OPTIONS, *configured, *(known for known in dir(base) if not known.startswith("_"))}
        _refuse(
            task,
            name,
            value,
            f"there is no such option{nearest(name, known, list_all=False)}; options of this package are "
            f"{', '.join(OPTIONS)}; an attribute of your own belongs on the task's base class",
        )


def signature_of(run: Callable[..., Any], *, bound: bool) -> Signature:
    """The signature of a task's body as its callers see it. ``bound``: its first parameter is the task itself."""
    signature = inspect.signature(run)
    if bound:
        signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    return signature


def check_limit(where: str, value: Any, error: _Error) -> int:
    """The value, if it can be a limit: a whole number from 0 (admits nothing) up (case E6)."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LIMIT_MAX:
        raise error(f"{where} = {value!r:.100}: give a whole number from 0 to {LIMIT_MAX}")
    return value


def _key_option(task: str, name: str, value: Any, signature: Signature) -> Template | Callable[..., Any] | None:
    if value is None:
        return None
    if isinstance(value, str):
        return Template(f"{task}: {name}", value, signature)
    if not callable(value):
        _refuse(task, name, value, "give a text, maybe with {argument} fields, or a callable with the task's signature")
    function: Callable[..., Any] = value
    return function


def _limit_option(task: str, name: str, value: Any) -> int | Callable[..., Any] | None:
    if value is None or (callable(value) and not isinstance(value, type)):
        return value
    return check_limit(f"{task}: {name}", value, ConfigurationError)


def _seconds(task: str, name: str, value: Any) -> float | None:
    if value is None:
        return None
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= SECONDS_MAX:
        _refuse(task, name, value, f"give seconds from 0 to {SECONDS_MAX:.0f}, or a timedelta")
    return float(seconds)


def _retry_delay(task: str, value: Any, backoff: Any) -> RetryDelay | None:
    if value is None:
        return None
    if not callable(value) or isinstance(value, type):
        _refuse(
            task, "retry_delay", value, "give a callable (error, retries) → seconds; a number is default_retry_delay"
        )
    try:
        inspect.signature(value).bind(None, 0)
    except TypeError as error:
        _refuse(task, "retry_delay", value, f"it is called with (error, retries): {error}")
    except ValueError:  # it has no signature that could be read
        pass
    if backoff:
        _refuse(task, "retry_delay", value, f"retry_backoff = {backoff!r} says it too: give one of them")
    function: RetryDelay = value
    return function


def _losses(task: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_WORKER_LOSSES_MAX:
        _refuse(task, "max_worker_losses", value, f"give a whole number from 0 to {MAX_WORKER_LOSSES_MAX}")
    return value


def _refuse(task: str, name: str, value: Any, remedy: str) -> NoReturn:
    raise ConfigurationError(f"{task}: {name} = {value!r:.100}: {remedy}")
