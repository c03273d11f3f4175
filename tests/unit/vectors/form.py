"""The form of a vector file, as topics/vectors/README.md explains it. Unknown fields are errors here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FOLDER = Path(__file__).resolve().parents[3] / "topics" / "vectors"

Document = dict[str, Any]
"""A message, exactly as it goes over the wire."""


class Form(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Position(Form):
    epoch: int
    version: int


class Counts(Form):
    in_use: int = 0
    waiting: int = 0
    oldest_wait_ms: int = 0


class ClientGroup(Form):
    claimed: int = 0
    permits: int = 0
    counted: int = 0
    last_use_ms: int = 0
    keeps: int | None = None
    keeps_seq: int | None = None
    claims: int | None = None
    turn_until_ms: int | None = None
    blocked: str | None = None


class ClientRow(Form):
    ack: Position | None = None
    limit: int | None = None
    declared: Document = Field(default_factory=dict)
    groups: dict[str, ClientGroup] = Field(default_factory=dict)
    report: Document | None = None
    answered: bool = False
    made_at_ms: int = 0
    sent_at_ms: int = 0
    repeats: int = 0


class ClientInput(Form):
    now_ms: int
    counts: dict[str, Counts] = Field(default_factory=dict)
    declared: Document | None = None
    reply: Document | None = None


class ClientOutput(Form):
    admit: dict[str, int] = Field(default_factory=dict)
    report: Document | None = None
    repeat: bool = False
    due_at_ms: int | None = None
    shown: dict[str, str] | None = None


class ClientStep(Form):
    about: str
    input: ClientInput = Field(alias="in")
    after: ClientRow | None
    output: ClientOutput = Field(alias="out")


class ClientDatabase(Form):
    client_id: str
    incarnation: str
    account: str
    seq_newest: int


class Offer(Form):
    permits: int
    version: int
    until_ms: int


class Entry(Form):
    version: int
    permits: int
    claims: int | None = None
    turn_ms: int | None = None


class HolderGroup(Form):
    claimed: int = 0
    in_use: int = 0
    waiting: int = 0
    served: int = 0
    entries: list[Entry] = Field(default_factory=list)
    offer: Offer | None = None
    window_ms: int | None = None
    turn_ms: int | None = None
    turn_claimed: int = 0


class Standing(Form):
    says_something: bool
    epoch: int = 0
    version: int = 0


class HolderClient(Form):
    incarnation: str
    seq: int
    reported_at_ms: int
    declared: Document = Field(default_factory=dict)
    sent: int
    must_ack: int | None = None
    unknown: bool = False
    forfeited: bool = False
    pressed: bool = False
    standing: Standing | None = None
    repeat_at_ms: int | None = None
    repeats: int = 0
    groups: dict[str, HolderGroup] = Field(default_factory=dict)


class Commands(Form):
    limit: int | None = None
    group_limits: dict[str, int] = Field(default_factory=dict)
    paused: bool = False
    seqs: dict[str, int] = Field(default_factory=dict)


class HolderRow(Form):
    epoch: int
    version: int
    told: int | None = None
    rebuilding: bool = False
    commands: Commands = Field(default_factory=Commands)
    clients: dict[str, HolderClient] = Field(default_factory=dict)


class HolderInput(Form):
    now_ms: int
    version: int
    messages: list[Document] = Field(default_factory=list)


class HolderOutput(Form):
    replies: list[Document] = Field(default_factory=list)
    footprint: dict[str, int] = Field(default_factory=dict)
    due_at_ms: int | None = None
    mirror: Document | None = None
    refused: list[str] = Field(default_factory=list)
    warnings: int = 0


class HolderStep(Form):
    about: str
    input: HolderInput = Field(alias="in")
    after: HolderRow | None
    output: HolderOutput = Field(alias="out")


class HolderDatabase(Form):
    account: str
    epoch: int


class FootprintCase(Form):
    about: str
    claimed: int
    released: int
    entries: list[Entry]
    offered: int = 0
    footprint: int


class Received(Form):
    about: str
    topic: Literal["accounts", "replies"]
    key: str
    body: str | None
    read_as: Document | None = None
    refused: str | None = None


class Vector(Form):
    name: str
    about: str
    rules: list[str] = Field(min_length=1)


class ClientVector(Vector):
    core: Literal["client"]
    database: ClientDatabase
    before: ClientRow | None
    steps: list[ClientStep] = Field(min_length=1)


class HolderVector(Vector):
    core: Literal["holder"]
    database: HolderDatabase
    before: HolderRow | None
    steps: list[HolderStep] = Field(min_length=1)


class FootprintVector(Vector):
    core: Literal["footprint"]
    cases: list[FootprintCase] = Field(min_length=1)


class ReaderVector(Vector):
    core: Literal["reader"]
    messages: list[Received] = Field(min_length=1)


AnyVector = ClientVector | HolderVector | FootprintVector | ReaderVector
_FORMS: dict[str, type[ClientVector] | type[HolderVector] | type[FootprintVector] | type[ReaderVector]] = {
    "client": ClientVector,
    "holder": HolderVector,
    "footprint": FootprintVector,
    "reader": ReaderVector,
}


def files() -> list[Path]:
    """All vector files, in order."""
    return sorted(FOLDER.glob("*.json"))


def read(path: Path) -> AnyVector:
    """One vector file. Raises :class:`pydantic.ValidationError` where it is not of the documented form."""
    text = path.read_text(encoding="utf-8")
    return _FORMS[json.loads(text)["core"]].model_validate_json(text)
