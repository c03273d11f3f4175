"""The holder's row of one account, and its JSON, which is rewritten often and therefore small."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from celery_durable.permits.messages import Declared, LimitMirror
from celery_durable.permits.state import short_json


class Entry(NamedTuple):
    """What one reply showed for one pair, until a newer one that shows something else is acknowledged."""

    version: int
    permits: int
    claims: int | None = None
    turn_ms: int | None = None


NOTHING = Entry(0, 0)
_ROW_MIN = 5
"""What is in the row of every pair."""


@dataclass(slots=True)
class Pair:
    """One group of one client: what its newest report said, and what was sent to it."""

    claimed: int = 0
    used: int = 0
    waiting: int = 0
    """0 also where the demand was forgotten, since a grant for it was lost."""
    served: int = 0
    """The version of the decision that served it last; for one never served, just above those that waited before."""
    entries: list[Entry] = field(default_factory=list)
    """Oldest first: all that the client may still act by."""
    offered: int = 0
    """An open grant, the version that offers it, and when it is lost."""
    offered_version: int = 0
    offered_until_ms: int = 0
    window_ms: int = 0
    """The next claim window; 0: the shortest."""
    turn_ms: int = 0
    """How long its newest turn is, and what it had claimed when that began; 0: it had none."""
    turn_claimed: int = 0
    claiming: int = 0
    """A grant that the report at hand claims. Never stored: a decision turns it into permits or drops it."""

    @property
    def demand(self) -> int:
        """What it could have in use at once, as far as is known."""
        return self.used + self.waiting

    @property
    def newest(self) -> Entry:
        """What was sent last."""
        return self.entries[-1] if self.entries else NOTHING

    def end_grant(self) -> int:
        """Closes the open grant, if there is one. Returns how much it offered."""
        offered, self.offered, self.offered_version, self.offered_until_ms = self.offered, 0, 0, 0
        return offered

    def copy(self) -> Pair:
        """An independent copy."""
        return Pair(
            self.claimed,
            self.used,
            self.waiting,
            self.served,
            self.entries.copy(),
            self.offered,
            self.offered_version,
            self.offered_until_ms,
            self.window_ms,
            self.turn_ms,
            self.turn_claimed,
        )

    def to_row(self) -> list[Any]:
        """The pair as a JSON list, as short as it can be."""
        row: list[Any] = [
            self.claimed,
            self.used,
            self.waiting,
            self.served,
            [_entry_row(entry) for entry in self.entries],
            self.offered,
            self.offered_version,
            self.offered_until_ms,
            self.window_ms,
            self.turn_ms,
            self.turn_claimed,
        ]
        while not row[-1] and len(row) > _ROW_MIN:
            row.pop()
        return row

    @classmethod
    def from_row(cls, row: list[Any]) -> Pair:
        """The pair that :meth:`to_row` wrote."""
        claimed, used, waiting, served, entries, *rest = row
        return cls(claimed, used, waiting, served, [Entry(*entry) for entry in entries], *rest)


class Standing(NamedTuple):
    """What decides, while an account is rebuilt, which of two databases under one ``client_id`` was accepted.

    The later one was accepted once the other kept nothing, and only who is accepted gets anything to acknowledge. So
    the newer acknowledgement decides, and before that, whether the newest report says anything.
    """

    says_something: bool
    epoch: int = 0
    """Of what was acknowledged; 0: nothing was."""
    version: int = 0


@dataclass(slots=True)
class Client:
    """One client in the account: what its newest report said, and how far replies to it have come."""

    incarnation: str
    seq: int = 0
    reported_at_ms: int = 0
    declared: Declared = field(default_factory=Declared)
    pairs: dict[str, Pair] = field(default_factory=dict)
    sent: int = 0
    """The version of the newest reply; 0: none was sent in this epoch."""
    must_ack: int = 0
    """The version that it is asked to acknowledge whatever it holds; 0: none."""
    unknown: bool = False
    """It has not acknowledged the epoch: what it was given before is not known, so nothing is given to anyone."""
    forfeited: bool = False
    """An operator took it for dead: nothing of it counts, until it speaks again."""
    pressed: bool = False
    """It was told that others wait for what it may not need."""
    standing: Standing | None = None
    """Of its newest report, where that was met while the account was rebuilt."""
    repeat_at_ms: int = 0
    """When the reply is repeated; 0: need not be."""
    tries: int = 0
    dirty: bool = False
    """The next reply shows something new. Never stored: every decision sends it."""

    def copy(self) -> Client:
        """An independent copy."""
        return Client(
            self.incarnation,
            self.seq,
            self.reported_at_ms,
            self.declared,
            {group: pair.copy() for group, pair in self.pairs.items()},
            self.sent,
            self.must_ack,
            self.unknown,
            self.forfeited,
            self.pressed,
            self.standing,
            self.repeat_at_ms,
            self.tries,
        )

    def to_document(self) -> dict[str, Any]:
        """The client as JSON, without what is empty."""
        document: dict[str, Any] = {"i": self.incarnation, "s": self.seq, "t": self.reported_at_ms, "v": self.sent}
        if self.declared != Declared():
            document["d"] = self.declared.model_dump(exclude_defaults=True)
        if self.pairs:
            document["p"] = {group: pair.to_row() for group, pair in self.pairs.items()}
        if self.must_ack:
            document["m"] = self.must_ack
        flags = self.unknown + 2 * self.forfeited + 4 * self.pressed
        if flags:
            document["f"] = flags
        if self.standing is not None:
            document["w"] = self.standing
        if self.repeat_at_ms:
            document["r"] = [self.repeat_at_ms, self.tries]
        return document

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Client:
        """The client that :meth:`to_document` wrote."""
        flags = document.get("f", 0)
        repeat_at_ms, tries = document.get("r", (0, 0))
        return cls(
            incarnation=document["i"],
            seq=document["s"],
            reported_at_ms=document["t"],
            declared=Declared.model_validate(document["d"]) if "d" in document else Declared(),
            pairs={group: Pair.from_row(row) for group, row in document.get("p", {}).items()},
            sent=document["v"],
            must_ack=document.get("m", 0),
            unknown=bool(flags & 1),
            forfeited=bool(flags & 2),
            pressed=bool(flags & 4),
            standing=Standing(*document["w"]) if "w" in document else None,
            repeat_at_ms=repeat_at_ms,
            tries=tries,
        )


@dataclass(frozen=True, slots=True)
class AccountState:
    """The holder's row of one account. The shell stores it as JSON and does not look inside."""

    account: str
    epoch: int
    version: int = 0
    """The version of the decision that changed it last."""
    clients: dict[str, Client] = field(default_factory=dict)
    limit: int | None = None
    """Commands in force: the limit, the groups' limits, the pause, and the newest seq by sender, kind and target."""
    group_limits: Mapping[str, int] = field(default_factory=dict)
    paused: bool = False
    seqs: Mapping[str, int] = field(default_factory=dict)
    told: int | None = None
    """The account's limit that the clients were told last."""
    rebuilding: bool = False
    """Found in the topic by a holder without a database: whoever is seen is unknown until it acknowledges."""

    def with_clients(self, clients: dict[str, Client]) -> AccountState:
        """The same account with other clients. Every decision begins with it, so it spares itself ``replace()``."""
        return AccountState(
            self.account,
            self.epoch,
            self.version,
            clients,
            self.limit,
            self.group_limits,
            self.paused,
            self.seqs,
            self.told,
            self.rebuilding,
        )

    @property
    def waits_for_epoch(self) -> bool:
        """Whether nothing may be given, since a client that was seen has not acknowledged the epoch."""
        return any(client.unknown and not client.forfeited for client in self.clients.values())

    @property
    def mirror(self) -> LimitMirror:
        """The commands in force, for the limits topic."""
        return LimitMirror(
            account=self.account,
            limit=self.limit,
            group_limits=dict(self.group_limits),
            paused=self.paused,
            seqs=dict(self.seqs),
        )

    def to_json(self) -> str:
        """The state as one JSON document."""
        document: dict[str, Any] = {"a": self.account, "e": self.epoch, "v": self.version}
        if self.clients:
            document["c"] = {name: client.to_document() for name, client in self.clients.items()}
        for key, value in (
            ("l", self.limit),
            ("g", dict(self.group_limits) or None),
            ("p", int(self.paused) or None),
            ("q", dict(self.seqs) or None),
            ("t", self.told),
            ("r", int(self.rebuilding) or None),
        ):
            if value is not None:
                document[key] = value
        return short_json(document)

    @classmethod
    def from_json(cls, text: str) -> AccountState:
        """The state that :meth:`to_json` wrote."""
        document = json.loads(text)
        return cls(
            account=document["a"],
            epoch=document["e"],
            version=document["v"],
            clients={name: Client.from_document(client) for name, client in document.get("c", {}).items()},
            limit=document.get("l"),
            group_limits=document.get("g", {}),
            paused="p" in document,
            seqs=document.get("q", {}),
            told=document.get("t"),
            rebuilding="r" in document,
        )


def _entry_row(entry: Entry) -> tuple[int | None, ...]:
    if entry.turn_ms is not None:
        return entry
    return entry[:2] if entry.claims is None else entry[:3]
