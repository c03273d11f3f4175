"""The messages of the protocol (design, section 8), as JSON through pydantic.

Every message is its sender's whole view of one account (rule 5): losing, doubling or reordering one changes nothing.
Unknown fields are ignored; an unknown ``v`` or a wrong type raises :class:`pydantic.ValidationError`, and the reader
sends that message to the dead-letter topic.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

MAX_INT = 2**63 - 1
LIMIT_MAX = 1_000_000_000
WAITING_ONLY_GROUPS_MAX = 200
"""Groups that only wait, at most so many in one report, oldest first, in rotation (section 8)."""

Count = Annotated[int, Field(ge=0, le=MAX_INT, strict=True)]
Key = Annotated[str, Field(min_length=1, max_length=1024)]
"""An account or a client's name. Empty is refused: Kafka would spread an empty key over all partitions."""
Group = Annotated[str, Field(max_length=1024)]
Limit = Annotated[int, Field(ge=0, le=LIMIT_MAX, strict=True)]

Reason = Literal["account_limit", "group_limit", "paused", "rate", "turn", "new_epoch", "holder_silent"]


class Message(BaseModel):
    """What all parts share: immutable, unknown fields ignored, so that newer senders can be read."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def to_bytes(self) -> bytes:
        """The message as it goes to Kafka: the same message always gives the same bytes."""
        return self.model_dump_json(exclude_none=True).encode()


class Ack(Message):
    """The newest reply that the client applied. Ordered by epoch, then version."""

    epoch: Count
    version: Count


class Rate(Message):
    """A token bucket: ``tokens`` each ``per_ms``, at most ``burst`` kept."""

    tokens: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
    per_ms: Annotated[int, Field(gt=0, strict=True)]
    burst: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]


class Declared(Message):
    """What the client's code declares for the account; the smallest where its tasks differ."""

    limit: Limit | None = None
    group_limit: Limit | None = None
    mutex: bool = False
    rate: Rate | None = None


class ReportGroup(Message):
    """One group in a report. In use is ``claimed - released``; ``keeps`` is what the client says it keeps."""

    group: Group = ""
    claimed: Count = 0
    released: Count = 0
    waiting: Count = 0
    oldest_wait_ms: Count = 0
    keeps: Count | None = None


class AccountReport(Message):
    """Client to holder: everything the client knows about one account."""

    v: Literal[1] = 1
    type: Literal["AccountReport"] = "AccountReport"
    client_id: Key
    incarnation: Key
    account: Key
    seq: Count
    ack: Ack | None = None
    groups: tuple[ReportGroup, ...] = ()
    declared: Declared = Declared()


class ReplyGroup(Message):
    """What one group of the client gets: see section 8 for ``permits``, ``claims``, ``turn_ms`` and ``offered``."""

    group: Group = ""
    permits: Count = 0
    claims: Count | None = None
    turn_ms: Count | None = None
    offered: Count = 0


class Blocked(Message):
    """Why a group gets no more."""

    group: Group = ""
    reason: Reason


class AccountLimit(Message):
    """The account's limit in force, how much of it is given out, and where the limit comes from."""

    limit: Limit
    in_use: Count
    source: str


class AccountReply(Message):
    """Holder to client: everything the holder gives that client in that account."""

    v: Literal[1] = 1
    type: Literal["AccountReply"] = "AccountReply"
    client_id: Key
    incarnation: Key
    account: Key
    epoch: Count
    version: Count
    answers: Count
    ack_wanted: bool = False
    groups: tuple[ReplyGroup, ...] = ()
    blocked: tuple[Blocked, ...] = ()
    account_limit: AccountLimit | None = None

    @property
    def ack(self) -> Ack:
        """The position of this reply, as the client acknowledges it."""
        return Ack(epoch=self.epoch, version=self.version)


class _Command(Message):
    """A command to an account's holder. ``seq`` is the sender's command counter, apart from the reports' ``seq``."""

    v: Literal[1] = 1
    client_id: Key
    account: Key
    seq: Count
    by: str = ""
    why: str = ""


class SetLimit(_Command):
    """Sets the limit of the account (``group`` null) or of one group; ``limit`` null takes the command's limit away."""

    type: Literal["SetLimit"] = "SetLimit"
    group: Group | None = None
    limit: Limit | None = None


class Pause(_Command):
    """Admits nothing in the account until Resume. The limit stays."""

    type: Literal["Pause"] = "Pause"


class Resume(_Command):
    """Ends a pause."""

    type: Literal["Resume"] = "Resume"


class Forfeit(_Command):
    """Frees what ``client`` holds in the account, up to what it was given at (``epoch``, ``version``)."""

    type: Literal["Forfeit"] = "Forfeit"
    client: Key
    epoch: Count
    version: Count


Command = SetLimit | Pause | Resume | Forfeit
AccountMessage = Annotated[AccountReport | SetLimit | Pause | Resume | Forfeit, Field(discriminator="type")]


class LimitMirror(Message):
    """The compacted mirror of an account's commands (topic ``limits``): a rebuild reads it before the reports."""

    v: Literal[1] = 1
    type: Literal["LimitMirror"] = "LimitMirror"
    account: Key
    limit: Limit | None = None
    group_limits: dict[Group, Limit] = Field(default_factory=dict)
    paused: bool = False
    seqs: dict[str, Count] = Field(default_factory=dict)
    """The newest command ``seq`` applied, by ``sender/kind/target``: older copies stay ignored after a rebuild."""


_ACCOUNT_MESSAGE: TypeAdapter[AccountReport | Command] = TypeAdapter(AccountMessage)


def read_account_message(body: bytes) -> AccountReport | Command:
    """Reads one message of the accounts topic. Raises :class:`pydantic.ValidationError` for anything else."""
    return _ACCOUNT_MESSAGE.validate_json(body)


def read_reply(body: bytes) -> AccountReply:
    """Reads one message of a replies topic. Raises :class:`pydantic.ValidationError` for anything else."""
    return AccountReply.model_validate_json(body)


def read_limit_mirror(body: bytes) -> LimitMirror:
    """Reads one message of the limits topic. Raises :class:`pydantic.ValidationError` for anything else."""
    return LimitMirror.model_validate_json(body)
