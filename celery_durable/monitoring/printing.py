"""What ``ps``, ``why`` and ``accounts`` print: tables on a terminal, plain columns into a pipe."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from celery_durable.console import wide_console
from celery_durable.monitoring.inspect import Account, Explanation, Operation
from celery_durable.store.schema import ENDED_STATES

_COLOURS = {"running": "green", "retrying": "yellow", "failed": "red", "cancelled": "red", "succeeded": "dim"}


def operations(found: Sequence[Operation]) -> None:
    """One line an operation."""
    if not found:
        wide_console().print("No operations.")
        return
    table = _table("ID", "TASK", "STATE", "ACCOUNT", "ATTEMPT", "AGE", "WHY")
    for each in found:
        account = "" if each.account is None else each.account + (f" / {each.group}" if each.group else "")
        table.add_row(
            _text(each.id),
            _text(each.task),
            Text(each.state, _COLOURS.get(each.state, "")),
            _text(account),
            str(each.attempt),
            duration(each.age_s),
            _text(each.why),
        )
    wide_console().print(table)


def explanation(found: Explanation) -> None:
    """A few lines about one operation."""
    console = wide_console()
    operation = found.operation
    console.print(
        Text.assemble((visible(operation.id), "bold"), "  ", operation.task, "  ", operation.state), soft_wrap=True
    )
    ended = operation.state in ENDED_STATES
    if found.summary != operation.state:
        console.print(_text(found.summary), soft_wrap=True)
    if operation.account is not None and not ended:
        limit = "no reply from the holder yet"
        if found.limit is not None:
            limit = f"limit {found.limit.limit} ({found.limit.source}), {found.limit.in_use} given out to all services"
        console.print(_text(f"Account {operation.account}: {limit}, {found.in_use} in use by this one"), soft_wrap=True)
    if operation.state == "queued":
        console.print(f"Before it in the queue: {found.before}")
    if found.permits_held_by and not ended:
        console.print("Permits are held by:")
        for each in found.permits_held_by:
            console.print(_text(f"  {each.id}  {each.task}  {each.state}: {each.why}"), soft_wrap=True)
    for attempt in found.attempts:
        line = f"Attempt {attempt.attempt} {attempt.outcome} {duration(attempt.ended_s)} ago: {attempt.error or ''}"
        console.print(_text(line.rstrip(": ")), soft_wrap=True)


def accounts(found: Sequence[Account]) -> None:
    """One line an account, and one a group that has a name."""
    if not found:
        wide_console().print("No account is in use.")
        return
    table = _table("ACCOUNT", "GROUP", "LIMIT", "IN USE", "GIVEN OUT", "WAITING", "SCHEDULED", "OLDEST", "WHY")
    for account in found:
        alone = account.groups[0].reason if len(account.groups) == 1 and not account.groups[0].group else None
        table.add_row(
            _text(account.account),
            "",
            "?" if account.limit is None else f"{account.limit} ({account.source})",
            str(account.in_use),
            "?" if account.in_use_everywhere is None else str(account.in_use_everywhere),
            str(account.waiting),
            str(account.scheduled),
            "" if account.oldest_wait_s is None else duration(account.oldest_wait_s),
            _words(alone),
        )
        for group in account.groups:
            if group.group:
                in_use, waiting = str(group.in_use), str(group.waiting)
                limit = "" if group.declared_limit is None else f"{group.declared_limit} (declared)"
                table.add_row("", _text(group.group), limit, in_use, "", waiting, "", "", _words(group.reason))
    wide_console().print(table)


def visible(text: str) -> str:
    """The text with what would steer a terminal (escapes, line ends, changes of direction) written out.

    IDs, accounts and errors may come from outside.
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _text(text: str) -> Text:
    return Text(visible(text))


def _words(reason: str | None) -> Text:
    return _text((reason or "").replace("_", " "))


def duration(seconds: float) -> str:
    """A duration as people read it: ``0.4 s``, ``12 s``, ``3 m 5 s``, ``2 h 10 m``, ``4 d 1 h``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, part, smaller in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {smaller}"
    return f"{whole} s"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in ("STATE", "ATTEMPT", "AGE", "OLDEST"))
    return table
