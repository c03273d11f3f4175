"""Why an operation is in its state, in words for people: from its row and from its account's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, select

from celery_durable.permits.messages import AccountLimit, AccountReply, read_reply
from celery_durable.store.sql import parts

if TYPE_CHECKING:
    from celery_durable.store.schema import Tables


@dataclass(frozen=True, slots=True)
class Known:
    """What an account's row says: why its groups wait, and the holder's newest reply."""

    blocked: Mapping[str, str]
    reply: AccountReply | None

    @property
    def limit(self) -> AccountLimit | None:
        """The account's limit as the holder last said it."""
        return self.reply.account_limit if self.reply else None

    def offered(self, group: str) -> int:
        """Permits that are offered to the group and not yet confirmed."""
        return sum(g.offered for g in self.reply.groups if g.group == group) if self.reply else 0


NOTHING = Known({}, None)
"""Of an account without a row."""


def load_known(connection: Connection, tables: Tables, names: Collection[str]) -> dict[str, Known]:
    """What the rows of these accounts say; accounts without a row are left out."""
    rows = tables.accounts
    known = {}
    for some in parts(sorted(names)):
        statement = select(rows.c.account, rows.c.blocked, rows.c.reply).where(rows.c.account.in_(some))
        for row in connection.execute(statement):
            reply = read_reply(row.reply.encode()) if row.reply else None
            known[row.account] = Known(row.blocked or {}, reply)
    return known


def short_reason(row: Any, known: Known) -> str:
    """A few words for an operation's row, read together with the database's time as ``now``."""
    due_s = 0.0 if row.due_at is None else max(0.0, (row.due_at - row.now) / 1000)
    match row.state:
        case "scheduled":
            text = f"due in {due_s:.0f} s"
        case "queued":
            text = queued_reason(row.group, known)
        case "admitted":
            text = f"sent to queue {row.queue}, no worker has started it" if row.sends else "may run, not sent yet"
        case "running":
            overdue = row.alive_until is not None and row.alive_until < row.now
            text = "its heartbeats are overdue" if overdue else "runs"
            text = text if row.cancel_requested_at is None else "asked to stop"
        case "retrying":
            text = f"attempt {row.attempt} due in {due_s:.0f} s, keeps its permit"
        case _:
            text = _first_line(row.error) if row.error else str(row.state)
    return text


def queued_reason(group: str, known: Known) -> str:
    """The same for a queued operation; it changes only with the account's row."""
    if known.offered(group):
        return "a permit is being claimed for its group"
    reason = known.blocked.get(group, "waits for a dispatcher").replace("_", " ")
    nothing = reason == "account limit" and known.limit is not None and known.limit.limit == 0
    return f"{reason} is 0" if nothing else reason


@dataclass(frozen=True, slots=True)
class Waiting:
    """A queued operation and what is known of its account."""

    account: str
    group: str
    reason: str | None
    limit: AccountLimit | None
    offered: int = 0
    before: int = 0


def describe_reason(waiting: Waiting) -> str:
    """One sentence: which limit, how full it is and who set it, and how many operations come first."""
    place = f"; {waiting.before} of its group come first" if waiting.before else "; it is the first of its group"
    return _sentence(waiting) + place


_OFFERED = "a permit is offered and is being claimed{full}"
_UNKNOWN = (
    "a dispatcher has not asked the holder for a permit yet, or waits for its answer; if this lasts, check that "
    "`celery -A <app> durable dispatcher` and `holder-service run` run, and what they log"
)
_NOTHING = "the limit of account {account!r} is 0, so nothing is admitted; it is {source}{raise_it}"
_RAISE = {
    "command": ": raise it with celery_durable.limits.set(), or take it away with limits.unset()",
    "rule": ": raise it in HOLDER_LIMITS",
    "declared": ": raise limit= there, or say more with celery_durable.limits.set()",
}
_SENTENCES = {
    "account_limit": "the limit of account {account!r} is reached{full}",
    "group_limit": "the limit of group {group!r} in account {account!r} is reached; holder-service accounts shows it",
    "paused": "account {account!r} is paused{full}",
    "rate": "the rate of account {account!r} is used up for now{full}",
    "turn": "more want account {account!r} than it has permits; they take turns{full}",
    "new_epoch": "the holder started anew and waits for every service that used account {account!r}",
    "holder_silent": "the holder has not answered for account {account!r}: is it running, and Kafka reachable? "
    "It answers one database alone under a client_id: if another one uses this service's, the dispatcher's log says so",
}


def _sentence(waiting: Waiting) -> str:
    limit = waiting.limit
    if limit is not None and limit.limit == 0 and waiting.reason == "account_limit":
        raise_it = _RAISE.get(limit.source.partition(" ")[0], "")
        return _NOTHING.format(account=waiting.account, source=_source(limit), raise_it=raise_it)
    full = f" ({limit.in_use} of {limit.limit} in use in all services, {_source(limit)})" if limit else ""
    template = _OFFERED if waiting.offered else _SENTENCES.get(waiting.reason or "", waiting.reason or _UNKNOWN)
    return template.format(account=waiting.account, group=waiting.group, full=full)


def _source(limit: AccountLimit) -> str:
    """Whose word the limit is, for people."""
    kind, _, key = limit.source.partition(" ")
    words = {
        "command": "set by a command",
        "rule": f"by the holder's rule {key!r}",
        "declared": "declared by the services' code",
        "mutex": "a mutex by the services' code",
        "default": "by default",
    }
    return words.get(kind, f"from {limit.source}")


def _first_line(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= 80 else line[:79] + "…"
