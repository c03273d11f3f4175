"""How one report or command changes what the holder knows of an account (design, sections 8 and 10)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

from celery_durable.permits.messages import AccountReport, Command, Forfeit, Pause, ReportGroup, SetLimit
from holder_service.account import AccountState, Client, Pair, Standing
from holder_service.footprint import acknowledge, footprint, held, keep, show_anew

COMMANDS_BYTES_MAX = 900_000
"""Names of what was commanded in one account, at most: so its mirror fits a Kafka message of 1 MB. They never shrink:
an old copy of a command may come at any time, and must find a newer number of its sender, kind and target."""
_NUMBER_BYTES = 22
"""What a name brings with it in the mirror: a number, a colon, a comma."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A message that this account's holder refuses: it goes to the dead-letter topic with the reason."""

    message: AccountReport | Command
    reason: str


@dataclass(slots=True)
class Work:
    """One decision in the making, on a state of its own."""

    state: AccountState
    now_ms: int
    version: int
    changed: bool = False
    mirror_changed: bool = False
    declared_changed: bool = False
    commands_bytes: int | None = None
    """Of the names of what was commanded so far; measured when it is asked for, once."""
    answer: dict[str, None] = field(default_factory=dict)
    """The clients that are to be answered, in order."""
    refusals: list[Refusal] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def take(work: Work, message: AccountReport | Command) -> None:
    """Applies one message. A refused, old or doubled one changes nothing."""
    if isinstance(message, AccountReport):
        _take_report(work, message)
    else:
        _take_command(work, message)


def begin_epoch(state: AccountState, epoch: int) -> AccountState:
    """The account in a new epoch: nothing is given until each client seen has acknowledged it."""
    clients = {}
    for name, known in state.clients.items():
        client = clients[name] = known.copy()
        if state.rebuilding and client.standing is None:
            # It may not have acknowledged all that it was sent; who was accepted after it has, of what was sent later.
            client.standing = Standing(not counted_nothing(client), state.epoch, client.sent)
        client.unknown, client.sent, client.must_ack = True, 0, 0
        client.repeat_at_ms = client.tries = 0
        for pair in client.pairs.values():
            pair.end_grant()
    return replace(state, epoch=epoch, clients=clients)


def forfeit(work: Work, client: Client) -> None:
    """Counts nothing of the client any more, and tells it to stop, should it ever listen.

    In a new version, even if it was told so before: when it comes back, that is what tells a copy of the command from
    a new one.
    """
    client.forfeited, client.dirty = True, True
    client.must_ack = 0
    for pair in client.pairs.values():
        pair.waiting = pair.claiming = pair.window_ms = 0
        pair.end_grant()
        show_anew(client, pair, work.version, 0)
    work.changed = True


def _take_report(work: Work, report: AccountReport) -> None:
    ack = None if report.ack is None else (report.ack.epoch, report.ack.version)
    client = work.state.clients.get(report.client_id)
    standing = _standing(report, ack, client) if work.state.rebuilding else None
    if client is not None and client.incarnation != report.incarnation:
        if not client.forfeited and not _stands_above(standing, client.standing):
            _refuse_incarnation(work, client, report)
            return
        client = None
    if any(group.released > group.claimed for group in report.groups):
        work.refusals.append(Refusal(report, "a group's released is above its claimed"))
        return
    if client is not None and report.seq <= client.seq:
        work.answer[report.client_id] = None
        return
    shown = work.version if client is None else client.sent
    if ack is not None and ack > (work.state.epoch, shown):
        # It was told more than this holder remembers: whatever else was given, only its next acknowledgement tells.
        epoch = max(work.now_ms, ack[0] + 1)
        work.state = begin_epoch(work.state, epoch)
        work.warnings.append(
            f"account {report.account!r}: client {report.client_id!r} acknowledged epoch {ack[0]} version {ack[1]}, "
            f"which this holder never sent; the account waits for all its clients in epoch {epoch}"
        )
        client = None if client is None else work.state.clients[report.client_id]
        unknown = True
    else:
        unknown = work.state.rebuilding and client is None
    work.answer[report.client_id] = None
    work.changed = True
    if client is None:
        client = work.state.clients[report.client_id] = Client(report.incarnation, sent=work.version, dirty=True)
        work.declared_changed = True
        if ack is not None and report.groups:
            client.must_ack = work.version
    elif client.forfeited:
        # It lives. What it holds counts again, until it acknowledges that it was told to stop.
        client.forfeited = False
        client.must_ack = client.sent
    if unknown or (ack is not None and ack[0] < work.state.epoch and report.groups):
        client.unknown, client.dirty = True, True
    client.seq, client.reported_at_ms, client.standing = report.seq, work.now_ms, standing
    if client.declared != report.declared:
        client.declared = report.declared
        work.declared_changed = True
    _take_groups(work, client, report)
    if ack is not None and ack[0] == work.state.epoch:
        _take_ack(client, ack[1])


def _standing(report: AccountReport, ack: tuple[int, int] | None, known: Client | None) -> Standing:
    says_something = any(group.claimed > group.released or group.waiting or group.keeps != 0 for group in report.groups)
    position = ack or (0, 0)
    if known is not None and known.forfeited and known.standing is not None:
        # Nor does an old report of the forfeited one take this one's place.
        position = max(position, known.standing[1:])
    return Standing(says_something, *position)


def _stands_above(standing: Standing | None, known: Standing | None) -> bool:
    return standing is not None and known is not None and standing > known


def _refuse_incarnation(work: Work, client: Client, report: AccountReport) -> None:
    work.refusals.append(
        Refusal(
            report,
            f"client_id {report.client_id!r} has incarnation {report.incarnation!r}, while database "
            f"{client.incarnation!r} of that name is known here; give the second database a client_id of its own, "
            f"or forfeit the first if it is gone for ever",
        )
    )


def _take_groups(work: Work, client: Client, report: AccountReport) -> None:
    listed: dict[str, ReportGroup] = {group.group: group for group in report.groups}
    behind = _behind_who_waits(work.state) if any(name not in client.pairs for name in listed) else 0
    for name, group in listed.items():
        pair = client.pairs.get(name)
        if pair is None:
            pair = client.pairs[name] = Pair(served=behind)
        if group.claimed - group.released > held(pair):
            # More than it was given, as far as is known: an old copy, or a holder that forgot. A living client tells.
            client.must_ack, client.dirty = work.version, True
        pair.claimed, pair.used, pair.waiting = group.claimed, group.claimed - group.released, group.waiting
        if group.keeps is not None and keep(pair, group.keeps):
            client.dirty = True
    for name, pair in client.pairs.items():
        if name not in listed:
            pair.claimed = pair.used = pair.waiting = 0
            if keep(pair, 0):
                client.dirty = True


def _behind_who_waits(state: AccountState) -> int:
    """Where a new pair stands: behind all that wait with nothing, so that one that comes and goes passes none by."""
    pairs = [pair for client in state.clients.values() for pair in client.pairs.values() if pair.waiting]
    return 1 + max((pair.served for pair in pairs if not pair.offered and not held(pair)), default=-1)


def _take_ack(client: Client, version: int) -> None:
    client.unknown = False
    if client.must_ack and version >= client.must_ack:
        client.must_ack = 0
    for pair in client.pairs.values():
        acknowledge(pair, version)
        if pair.offered and version >= pair.offered_version:
            pair.claiming, pair.window_ms = pair.end_grant(), 0
            client.dirty = True


def _take_command(work: Work, command: Command) -> None:
    state = work.state
    key = _command_key(command)
    if command.seq <= state.seqs.get(key, -1):
        return
    if key not in state.seqs:
        if work.commands_bytes is None:
            work.commands_bytes = sum(map(_bytes_of, state.seqs))
        size = work.commands_bytes + _bytes_of(key)
        if isinstance(command, SetLimit) and command.group is not None and size > COMMANDS_BYTES_MAX:
            _refuse_group(work, command, size)
            return
        work.commands_bytes = size
    work.changed = work.mirror_changed = True
    state = replace(state, seqs={**state.seqs, key: command.seq})
    if isinstance(command, SetLimit):
        if command.group is None:
            state = replace(state, limit=command.limit)
        else:
            limits = dict(state.group_limits)
            limits.pop(command.group, None)
            if command.limit is not None:
                limits[command.group] = command.limit
            state = replace(state, group_limits=limits)
    elif not isinstance(command, Forfeit):
        state = replace(state, paused=isinstance(command, Pause))
    work.state = state
    if isinstance(command, Forfeit):
        _take_forfeit(work, command)


def _bytes_of(name: str) -> int:
    # Twice: a group is named by its number, and again by its limit, now or later.
    return 2 * (len(json.dumps(name, ensure_ascii=False).encode()) + _NUMBER_BYTES)


def _refuse_group(work: Work, command: SetLimit, size: int) -> None:
    work.refusals.append(
        Refusal(
            command,
            f"group {command.group!r:.100}: commands for so many groups of the account are remembered that one more "
            f"makes {size} bytes, at most {COMMANDS_BYTES_MAX}; groups that were commanded before still obey: for "
            "others declare group_limit in the code, or give the holder a rule",
        )
    )


def _take_forfeit(work: Work, command: Forfeit) -> None:
    client = work.state.clients.get(command.client)
    if client is None or client.forfeited:
        return
    upto = (command.epoch, command.version)
    # An oldest entry above that was acknowledged, or is all that the client ever got: it spoke since.
    given_after = not client.unknown and any(
        (work.state.epoch, pair.entries[0].version) > upto
        or any(entry.permits and (work.state.epoch, entry.version) > upto for entry in pair.entries)
        for pair in client.pairs.values()
        if pair.entries
    )
    if given_after:
        work.warnings.append(
            f"account {command.account!r}: forfeit of client {command.client!r} up to epoch {command.epoch} version "
            f"{command.version} is ignored: the client was given permits after that; if it is gone, forfeit it again"
        )
        return
    freed = sum(footprint(client, pair) for pair in client.pairs.values())
    work.warnings.append(
        f"account {command.account!r}: client {command.client!r} is forfeited by {command.by or command.client_id!r} "
        f"({command.why}): {freed} permits of it count no more"
    )
    forfeit(work, client)


def _command_key(command: Command) -> str:
    if isinstance(command, SetLimit):
        return (
            f"{command.client_id}/SetLimit"
            if command.group is None
            else f"{command.client_id}/SetLimit/{command.group}"
        )
    if isinstance(command, Forfeit):
        return f"{command.client_id}/Forfeit/{command.client}"
    return f"{command.client_id}/Pause"


def forget_forfeits(seqs: dict[str, int]) -> dict[str, int]:
    """The commands' numbers without the forfeits: a rebuild meets those again, in their order among the reports."""
    return {key: seq for key, seq in seqs.items() if "/Forfeit/" not in key}


def counted_nothing(client: Client) -> bool:
    """Whether the client holds nothing and waits for nothing, whatever it may still act by."""
    return all(not pair.offered and not pair.waiting and not held(pair) for pair in client.pairs.values())
