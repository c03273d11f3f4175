"""Commands to an account's holder: staged in the outbox, in the caller's transaction where there is one.

A command that was rolled back was never given (case E3). The dispatcher sends it; the holder ignores older ones of this
sender, kind and target, by ``seq``.
"""

from __future__ import annotations

import getpass
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from celery_durable import transactions
from celery_durable.call_options import storable
from celery_durable.errors import EnqueueError
from celery_durable.permits.messages import MAX_INT, Command, Forfeit, Pause, Resume, SetLimit
from celery_durable.runtime import app_or_current, runtime_of
from celery_durable.store.clock import now_ms
from celery_durable.store.counters import draw, raise_to
from celery_durable.store.outbox import Staged, stage
from celery_durable.templates import check_key

if TYPE_CHECKING:
    from celery import Celery

COMMAND_SEQ = "command_seq"
"""The counter that numbers this database's commands, apart from its reports."""
TEXT_BYTES_MAX = 2_000
"""Longest ``by`` and ``why``: a command must fit a Kafka message, and stays in the holder's row of the account."""


def set_limit(
    account: str, limit: int | None, group: str | None = None, *, by: str | None, why: str, app: Celery | None
) -> None:
    """Stages ``SetLimit``; see :mod:`celery_durable.limits`. ``limit`` None takes the command's limit away."""
    if group is not None:
        group = _group(group)
    # The whole account's slot must not be that of a group of the same name, "*".
    slot = "SetLimit:*" if group is None else f"SetLimit:={group}"
    _stage(account, slot, lambda **common: SetLimit(limit=limit, group=group, **common), by=by, why=why, app=app)


def pause(account: str, *, by: str | None = None, why: str = "", app: Celery | None = None) -> None:
    """Admits nothing more in the account until :func:`resume`; what is admitted finishes, its retries too.

    :param by: who asks; None: this process's user and host. :param why: for people.
    :raises EnqueueError: the account is empty or no text.
    """
    _stage(account, "pause", Pause, by=by, why=why, app=app)


def resume(account: str, *, by: str | None = None, why: str = "", app: Celery | None = None) -> None:
    """Ends a pause. Parameters and errors as :func:`pause`."""
    _stage(account, "pause", Resume, by=by, why=why, app=app)


def forfeit(
    account: str, client: str, *, epoch: int, version: int, why: str, by: str | None = None, app: Celery | None = None
) -> None:
    """Frees the permits that a service which is gone for ever holds in the account.

    The bound no longer counts what that service may still be running: make sure that it runs nothing.

    :param client: the ``client_id`` of the service that is gone.
    :param epoch: with ``version``, what ``holder-service accounts --json`` shows for the account: what was given to
        that client later than this stays counted.
    :param why: recorded with ``by``; not empty.
    :raises EnqueueError: a value is empty or of a wrong type; the message names it.
    """
    check_key("client", client)
    if not isinstance(why, str) or not why.strip():
        raise EnqueueError(f"why = {why!r:.100}: say why the permits may be freed; the holder records it")
    for name, value in (("epoch", epoch), ("version", version)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_INT:
            raise EnqueueError(
                f"{name} = {value!r:.100}: give the whole number that holder-service accounts --json shows"
            )
    _stage(
        account,
        f"forfeit:{client}",
        lambda **common: Forfeit(client=client, epoch=epoch, version=version, **common),
        by=by,
        why=why,
        app=app,
    )


def _group(group: Any) -> str:
    return "" if group == "" else check_key("group", group)


def _stage(
    account: str, slot: str, make: Callable[..., Command], *, by: str | None, why: str, app: Celery | None
) -> None:
    check_key("account", account)
    by = _text("by", _user() if by is None else by)
    why = _text("why", why)
    runtime = runtime_of(app_or_current(app))
    tables, settings = runtime.tables, runtime.settings
    with transactions.transaction(runtime, "commands.stage") as connection:
        # The counter's row stays locked until the transaction ends, so commands are numbered in the order in which
        # they are committed. A database that was restored or made anew has forgotten what it drew: fewer than 1,000
        # a millisecond, so the clock is above all that the holder would take for newer.
        raise_to(connection, tables.counters, COMMAND_SEQ, now_ms() * 1000)
        seq = draw(connection, tables.counters, COMMAND_SEQ)[0]
        try:
            command = make(account=account, client_id=settings.client_id, seq=seq, by=by, why=why)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_context=False)[0]
            field = ".".join(str(part) for part in problem["loc"])
            raise EnqueueError(f"{field} = {problem['input']!r:.100}: {problem['msg']}") from None
        stage(connection, tables.outbox, [Staged(settings.accounts_topic, account, command.to_bytes(), slot=slot)])


def _text(name: str, value: Any) -> str:
    if not storable(value) or len(value.encode()) > TEXT_BYTES_MAX:
        raise EnqueueError(f"{name} = {value!r:.100}: give a text of at most {TEXT_BYTES_MAX} bytes without NUL")
    return str(value)


def _user() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):
        return socket.gethostname()
