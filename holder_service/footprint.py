"""What the holder counts against the limit, and what it wants to be acknowledged (design, section 8)."""

from __future__ import annotations

from celery_durable.permits.footprint import reach
from holder_service.account import Client, Entry, Pair

ENTRIES_MAX = 8
"""Unacknowledged entries kept apart; older ones are merged into one that counts at least as much."""


def held(pair: Pair) -> int:
    """The most that the client may have in use, by any reply that it may still act by; without an open grant."""
    most = pair.used
    for entry in pair.entries:
        most = max(most, reach(pair.used, pair.claimed, entry.permits, entry.claims))
    return most


def footprint(client: Client, pair: Pair) -> int:
    """What counts against the limit: what may come to be in use, and what is offered."""
    return 0 if client.forfeited else held(pair) + pair.offered


def acknowledge(pair: Pair, version: int) -> None:
    """Drops the entries that a newer acknowledged one superseded."""
    entries = pair.entries
    superseded = sum(1 for entry in entries if entry.version <= version) - 1
    if superseded > 0:
        del entries[:superseded]


def keep(pair: Pair, keeps: int) -> bool:
    """Lowers every entry to what the client says it keeps. Says whether any gave more."""
    lowered = any(entry.permits > keeps for entry in pair.entries)
    if lowered:
        pair.entries = [entry._replace(permits=min(entry.permits, keeps)) for entry in pair.entries]
    return lowered


def show(client: Client, pair: Pair, version: int, permits: int, turn_ms: int | None = None) -> None:
    """Gives the pair ``permits`` in the client's next reply, which has ``version``. The old entries count on."""
    newest = pair.newest
    if (newest.permits, newest.claims, newest.turn_ms) != (permits, None, turn_ms):
        show_anew(client, pair, version, permits, turn_ms)


def show_anew(client: Client, pair: Pair, version: int, permits: int, turn_ms: int | None = None) -> None:
    """As :func:`show`, with an entry of its own where the newest one says the same."""
    client.dirty = True
    if pair.entries and pair.newest.version == version:
        pair.entries.pop()
    pair.entries.append(Entry(version, permits, None, turn_ms))
    if len(pair.entries) > ENTRIES_MAX:
        pair.entries[:2] = [_either(*pair.entries[:2])]


def wants_ack(client: Client) -> bool:
    """Whether the holder could count less, or is sure of more, once the client acknowledged the newest reply."""
    return bool(client.must_ack or client.unknown) or any(_wants_ack(pair) for pair in client.pairs.values())


def _wants_ack(pair: Pair) -> bool:
    if pair.offered:
        return True
    if len(pair.entries) < 2:
        return False
    newest = pair.newest
    return any(
        older.permits > newest.permits
        or (newest.turn_ms is not None and older.turn_ms is None and older.permits > 0)
        or reach(pair.used, pair.claimed, older.permits, older.claims)
        > reach(pair.used, pair.claimed, newest.permits, newest.claims)
        for older in pair.entries[:-1]
    )


def _either(older: Entry, newer: Entry) -> Entry:
    """An entry that counts at least as much as both."""
    claims = None if older.claims is None or newer.claims is None else max(older.claims, newer.claims)
    turn_ms = None if older.turn_ms is None or newer.turn_ms is None else max(older.turn_ms, newer.turn_ms)
    return Entry(newer.version, max(older.permits, newer.permits), claims, turn_ms)
