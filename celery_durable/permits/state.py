"""The client's row of one account, and its JSON, which is rewritten often and therefore small."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from celery_durable.permits.footprint import reach
from celery_durable.permits.messages import Declared, Reason

Position = tuple[int, int]
"""(epoch, version): where a reply stands among all replies."""
short_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
"""A document as the rows of accounts hold it: an encoder made anew for each takes longer than it works."""


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Times of the client's protocol, in ms, and where each comes from (section 7)."""

    client_id: str
    incarnation: str
    idle_return_ms: int = 20_000
    report_repeat_min_ms: int = 1_000
    report_repeat_max_ms: int = 30_000
    waiting_repeat_max_ms: int = 600_000
    reporting_lifetime_ms: int = 600_000
    daily_report_ms: int = 86_400_000
    waiting_count_max: int = 1_000


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """What the rows say of one group, read while the account's lock is held. ``waiting`` is capped by the shell."""

    in_use: int = 0
    waiting: int = 0
    oldest_wait_ms: int = 0


@dataclass(slots=True)
class GroupState:
    """What the client was given in one group, and what it told of it."""

    claimed: int = 0
    """Claims since the record was made. Only grows."""
    permits: int = 0
    level: int = 0
    """The most that the holder may have counted for the group since the last report."""
    used_at_ms: int = 0
    """When a permit was last claimed or the lease was received."""
    keeps: int | None = None
    """What the client says it keeps, until a reply has answered the newest report that said so."""
    keeps_seq: int | None = None
    """The newest report that said so; none while no report has."""
    claims: int | None = None
    turn_until_ms: int | None = None
    blocked: Reason | None = None

    @classmethod
    def born(cls, keeps_seq: int | None) -> GroupState:
        """A group that is new in the row: it keeps nothing, so what was sent in an earlier life gives nothing."""
        return cls(keeps=0, keeps_seq=keeps_seq)

    def copy(self) -> GroupState:
        """An independent copy."""
        return GroupState(
            self.claimed,
            self.permits,
            self.level,
            self.used_at_ms,
            self.keeps,
            self.keeps_seq,
            self.claims,
            self.turn_until_ms,
            self.blocked,
        )

    def reach(self, in_use: int) -> int:
        """How many may come to be in use under what the group was given last."""
        return reach(in_use, self.claimed, self.permits, self.claims)

    def turn_is_over(self, now_ms: int) -> bool:
        """Whether the group had a turn, and may claim no more."""
        return self.turn_until_ms is not None and now_ms >= self.turn_until_ms

    def room(self, in_use: int, now_ms: int) -> int:
        """How many more may be admitted now."""
        if self.turn_is_over(now_ms):
            return 0
        room = self.permits - in_use
        if self.claims is not None:
            room = min(room, self.claims - self.claimed)
        return max(0, room)

    def give_back(self, keeps: int) -> None:
        """Keeps so many permits and no more, until a reply answers a report that says so."""
        self.permits = self.keeps = keeps
        self.keeps_seq = None


class SentGroup(NamedTuple):
    """One group as the last report listed it."""

    claimed: int
    released: int
    waiting: int
    oldest_wait_ms: int
    keeps: int | None

    @property
    def in_use(self) -> int:
        """In use when the report was made."""
        return self.claimed - self.released

    @property
    def demand(self) -> int:
        """In use and waiting when the report was made."""
        return self.claimed - self.released + self.waiting


class SentReport(NamedTuple):
    """The last report, kept whole: it is repeated byte for byte."""

    seq: int
    ack: Position | None
    groups: Mapping[str, SentGroup]

    @property
    def says_nothing(self) -> bool:
        """Whether it said that nothing is in use, waits or is kept."""
        return all(group.demand == 0 and group.keeps == 0 for group in self.groups.values())


@dataclass(frozen=True, slots=True)
class AccountState:
    """The client's row of one account. The shell stores it as JSON and does not look inside."""

    account: str
    ack: Position | None = None
    """The newest reply applied."""
    limit: int | None = None
    """The account's limit, as the newest reply told."""
    declared: Declared = field(default_factory=Declared)
    groups: Mapping[str, GroupState] = field(default_factory=dict)
    report: SentReport | None = None
    answered: bool = False
    """A reply has answered ``report``."""
    made_at_ms: int = 0
    """When ``report`` was made, and ``sent_at_ms``, ``tries``: last sent, and how often repeated."""
    sent_at_ms: int = 0
    tries: int = 0
    rotation: int = 0
    """Where the next report begins to list the groups that only wait."""
    must_report: bool = False
    """The holder must hear what is left, whatever it is: the database was restored, or a lease not taken."""

    def to_json(self) -> str:
        """The state as one JSON document."""
        document: dict[str, Any] = {"a": self.account}
        if self.ack is not None:
            document["k"] = self.ack
        if self.limit is not None:
            document["l"] = self.limit
        if self.declared != Declared():
            document["d"] = self.declared.model_dump(exclude_defaults=True)
        if self.groups:
            document["g"] = {name: _trimmed(_group_row(group)) for name, group in self.groups.items()}
        if self.report is not None:
            seq, ack, groups = self.report
            sent = {name: _trimmed([*group]) for name, group in groups.items()}
            document["r"] = [seq, ack, sent, int(self.answered), self.made_at_ms, self.sent_at_ms, self.tries]
        if self.rotation:
            document["o"] = self.rotation
        if self.must_report:
            document["m"] = 1
        return short_json(document)

    @classmethod
    def from_json(cls, text: str) -> AccountState:
        """The state that :meth:`to_json` wrote."""
        document = json.loads(text)
        report, answered, made_at_ms, sent_at_ms, tries = None, 0, 0, 0, 0
        if "r" in document:
            seq, ack, sent, answered, made_at_ms, sent_at_ms, tries = document["r"]
            groups = {name: SentGroup(*row, *_SENT_DEFAULTS[len(row) :]) for name, row in sent.items()}
            report = SentReport(seq, _position(ack), groups)
        return cls(
            account=document["a"],
            ack=_position(document.get("k")),
            limit=document.get("l"),
            declared=Declared.model_validate(document["d"]) if "d" in document else Declared(),
            groups={name: GroupState(*row) for name, row in document.get("g", {}).items()},
            report=report,
            answered=bool(answered),
            made_at_ms=made_at_ms,
            sent_at_ms=sent_at_ms,
            tries=tries,
            rotation=document.get("o", 0),
            must_report="m" in document,
        )


_SENT_DEFAULTS = (0, 0, 0, 0, None)


def _position(pair: list[int] | None) -> Position | None:
    return None if pair is None else (pair[0], pair[1])


def _group_row(group: GroupState) -> list[Any]:
    return [
        group.claimed,
        group.permits,
        group.level,
        group.used_at_ms,
        group.keeps,
        group.keeps_seq,
        group.claims,
        group.turn_until_ms,
        group.blocked,
    ]


def _trimmed(row: list[Any]) -> list[Any]:
    """The row without what is 0 or none at its end.

    Only where 0 is the default may a 0 go: the first four fields of both kinds of rows.
    """
    end = len(row)
    while end > 0 and (row[end - 1] is None or (end <= 4 and row[end - 1] == 0)):
        end -= 1
    return row[:end]
