"""``with celery_durable.using(session):`` makes enqueue, cancel and commands part of the caller's own transaction."""

from __future__ import annotations

import asyncio
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from sqlalchemy import Connection
from sqlalchemy.orm import Session
from sqlalchemy.util import concurrency

from celery_durable import collected, targets

Target: TypeAlias = Any
"""No type has all that is taken: Django's and the drivers' connections need not be installed."""


@dataclass(eq=False, slots=True)
class Use:
    """One ``using`` that was entered here."""

    target: Session | Connection
    outer: Use | None
    owner: tuple[int, object]
    open: bool = True
    """Not left yet, nor ended for one that never leaves it."""
    borrowed: bool = False
    """SQLAlchemy does not hear of the connection's other statements, nor of its commit: nothing waits."""
    errors: AbstractContextManager[Any] = field(default_factory=nullcontext)
    """Inside it a borrowed connection's errors are raised as its owner knows them."""
    asynchronous: bool = False
    """All that is enqueued waits until the connection's statements can be awaited."""
    connections: weakref.WeakSet[Connection] = field(default_factory=weakref.WeakSet)
    """Those that a call inside it went through."""


_entered: ContextVar[Use | None] = ContextVar("celery_durable_using", default=None)


class using:  # noqa: N801 - reads as the statement that it is part of
    """Inside, everything that celery-durable writes for the caller goes through ``target``'s transaction.

    It commits and rolls back with it, savepoints included (case D11); nothing is committed here. Nests: the innermost
    holds. It holds for this thread or asyncio task, not for those that it starts.

    The first call is written at once. Later ones that no ``task_id`` was given for are written together: before any
    other statement that SQLAlchemy executes on the connection, before its commit, at the latest when the block ends.
    What only the database can refuse is told there. Commit and roll back by SQLAlchemy: the driver's own ``commit()``
    and ``rollback()`` do not know of them, so what waited then is part of the transaction that the block's end begins.
    On a connection that is not SQLAlchemy's each call is written at once.

    ``async with using(session):`` takes an ``AsyncSession`` or ``AsyncConnection``. There all calls wait so, also those
    with a ``task_id``: ``duplicate`` does not tell, and what another body under a known ID raises is raised there. What
    needs an answer at once (``status``, ``cancel``, commands) is for ``await session.run_sync(…)``.

    :param target: on the service's own database: a SQLAlchemy ``Session``, ``scoped_session`` or ``Connection``; a
        connection of Django's, psycopg's, psycopg2's or ``sqlite3``'s, in a transaction or about to begin one.
    :raises EnqueueError: when it is entered: it is something else, or would commit each statement by itself; at the
        end, as a call, and :class:`DuplicateOperationError` at the end of an ``async`` block.
    :raises RuntimeError: this one was entered before.
    """

    def __init__(self, target: Target) -> None:
        self._given = target
        self._scope: AbstractContextManager[None] | None = None
        self._asynchronous: targets.Asynchronous | None = None

    def __enter__(self) -> None:
        self._require_new()
        accepted = targets.accept(self._given)
        use = Use(accepted.target, in_force(), _owner(), borrowed=accepted.borrowed, errors=accepted.errors)
        self._scope = _scope(use)
        self._scope.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return None if self._scope is None else self._scope.__exit__(*error)

    async def __aenter__(self) -> None:
        self._require_new()
        found = self._asynchronous = await targets.accept_async(self._given)
        if found is None:
            self.__enter__()
            return
        found.enter()
        self._scope = _scope(Use(found.connection.sync_connection, in_force(), _owner(), asynchronous=True))
        self._scope.__enter__()

    async def __aexit__(self, *error: Any) -> bool | None:
        if self._asynchronous is not None:
            self._asynchronous.leave()
            try:
                if not self._asynchronous.connection.closed:
                    await self._asynchronous.connection.run_sync(collected.finish, failing=error[0] is not None)
            except BaseException:
                self.__exit__(*sys.exc_info())
                raise
        return self.__exit__(*error)

    def _require_new(self) -> None:
        if self._scope is not None:
            raise RuntimeError("this using() was entered before: make another one for each block")


@contextmanager
def _scope(use: Use) -> Iterator[None]:
    _entered.set(use)
    try:
        yield
    except GeneratorExit:
        # Maybe by the collector of garbage, in the midst of a statement: what follows on the connection writes them.
        raise
    except BaseException:
        _finish(use, failing=True)
        raise
    else:
        _finish(use, failing=False)
    finally:
        # In whatever order they are left, and wherever: a generator that was dropped leaves it when it is collected.
        use.open = False
        _entered.set(in_force())
        if use.borrowed:
            use.target.close()


def _finish(use: Use, *, failing: bool) -> None:
    for connection in list(use.connections):
        collected.finish(connection, failing=failing)


def end_left_over() -> bool:
    """Ends every :func:`using` that is in force here, for code that did not leave it. True: there was one."""
    use = in_force()
    while (inner := in_force()) is not None:
        inner.open = False
    _entered.set(None)
    return use is not None


def in_force() -> Use | None:
    """The innermost :class:`using` of this thread and asyncio task that was not left yet."""
    use = _entered.get()
    if use is None:
        return None
    # A task that asyncio starts, or a thread of its ``to_thread``, has a copy of what was set here.
    owner = _owner()
    while use is not None and not (use.open and use.owner == owner):
        use = use.outer
    return use


def _owner() -> tuple[int, object]:
    """The thread, and the asyncio task that runs in it."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.get_ident(), task


def target_in_force() -> Session | Connection | None:
    """What statements go through here; None: transactions of our own."""
    use = in_force()
    return None if use is None else use.target


def in_callers_transaction() -> bool:
    """Whether a caller's transaction is in force here."""
    return in_force() is not None


def must_wait() -> bool:
    """Whether the transaction in force here is an asynchronous one, whose statements can only be awaited."""
    use = in_force()
    return use is not None and use.asynchronous and not _is_awaited_for()


def _is_awaited_for() -> bool:
    """Inside ``run_sync``, where SQLAlchemy awaits for whoever calls."""
    return bool(concurrency.in_greenlet())
