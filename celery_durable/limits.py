"""``celery_durable.limits.set("tenant:acme", 5)``: limits that an operator sets at run time.

A limit that was set wins over the holder's rules and over what tasks declare, until :func:`unset`; a mutex alone stays
a mutex. It applies to the next permits that are given: lowering revokes nothing that runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_durable import commands
from celery_durable.declaration import check_limit
from celery_durable.errors import EnqueueError

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["set", "unset"]


def set(
    account: str,
    limit: int,
    group: str | None = None,
    *,
    by: str | None = None,
    why: str = "",
    app: Celery | None = None,
) -> None:
    """Sets how many operations of the account, or of one of its groups, may hold a permit at once. 0 admits nothing.

    Staged in the caller's transaction where :func:`celery_durable.using` is in force, else committed at once; the
    dispatcher sends it to the holder.

    :param by: who asks; None: this process's user and host. :param why: for people.
    :param app: whose database; None: the current app.
    :raises EnqueueError: a limit that is no whole number from 0 up, an account or group that is empty or no text.
    """
    commands.set_limit(account, check_limit("limit", limit, EnqueueError), group, by=by, why=why, app=app)


def unset(
    account: str, group: str | None = None, *, by: str | None = None, why: str = "", app: Celery | None = None
) -> None:
    """Takes away what :func:`set` has set: the holder's rules and the tasks' declarations hold again."""
    commands.set_limit(account, None, group, by=by, why=why, app=app)
