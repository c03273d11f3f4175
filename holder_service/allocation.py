"""Who gets how much of an account: targets, lowering, raising (design, section 9). The fairness rules are here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from celery_durable.permits.messages import Reason
from holder_service.account import Client, Pair
from holder_service.footprint import footprint, held, show

CLAIMS_A_TURN = 4
"""A turn that lets in fewer is too short: the hand-over takes a large part of it."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What an allocation goes by. Times in ms."""

    limit: int
    """Of the whole account, now: 0 while it is paused or waits for an epoch."""
    stopped: Reason | None
    """Why the limit is 0, where that is not the limit itself."""
    group_limit: Callable[[str], int | None]
    now_ms: int
    version: int
    turn_ms: int
    turn_max_ms: int
    fresh_ms: int
    lease_extra_max: int
    claim_window_ms: int


@dataclass(slots=True)
class Seat:
    """One (client, group) pair in an allocation."""

    client_id: str
    client: Client
    group: str
    pair: Pair
    footprint: int
    target: int = 0

    @property
    def order(self) -> tuple[int, str, str]:
        """Served longest ago first; the names only make it definite."""
        return self.pair.served, self.client_id, self.group


@dataclass(slots=True)
class Scope:
    """The account or one group of it: its limit, what of it is given out, and who wants some."""

    limit: int
    used: int = 0
    wanting: int = 0
    missing: int = 0
    """How much its pairs are below their targets, together."""
    left: int = 0
    """What progressive filling has not dealt out yet, and to how many pairs it still deals."""
    open: int = 0
    waiting: int = 0
    """How many of its pairs still want more, once all is given."""

    @property
    def headroom(self) -> int:
        return max(0, self.limit - self.used)

    @property
    def contended(self) -> bool:
        """More pairs want permits than there are: they take turns."""
        return self.wanting > self.limit > 0

    @property
    def is_short(self) -> bool:
        """Something is to be given back by its holders."""
        return self.used > self.limit or self.missing > self.limit - self.used


class Allocation:
    """One allocation over the pairs of an account, in place; linear in them but for one sort."""

    def __init__(self, clients: dict[str, Client], terms: Terms) -> None:
        self._terms = terms
        self.account = Scope(terms.limit)
        self.groups: dict[str, Scope] = {}
        self.seats: list[Seat] = []
        self._waiting = 0
        for client_id, client in clients.items():
            if client.forfeited:
                continue
            for group, pair in client.pairs.items():
                seat = Seat(client_id, client, group, pair, footprint(client, pair))
                self.seats.append(seat)
                if group not in self.groups:
                    limit = terms.group_limit(group)
                    self.groups[group] = Scope(terms.limit if limit is None else min(limit, terms.limit))
                for scope in (self.account, self.groups[group]):
                    scope.used += seat.footprint
                    scope.wanting += pair.demand > 0
        self.seats.sort(key=lambda seat: seat.order)

    def run(self) -> None:
        """Claimed grants first, then targets, then lowering, then raising."""
        self._confirm()
        self._set_targets()
        self._lower()
        self._raise()
        self._count_waiting()

    def blocked(self, seat: Seat) -> Reason | None:
        """Why the pair gets no more, where it wants more or has what others wait for."""
        group = self.groups[seat.group]
        if seat.pair.demand > seat.footprint:
            if self._terms.stopped is not None:
                return self._terms.stopped
            if group.headroom == 0 and (self.account.headroom > 0 or group.limit < self.account.limit):
                return "turn" if group.contended and group.limit < self.account.limit else "group_limit"
            return "turn" if self.account.contended else "account_limit"
        if seat.footprint and self._others_wait(seat):
            return "account_limit"
        return None

    def pressed(self, seat: Seat) -> bool:
        """Whether others wait for what this pair has, though it is within its target and has no turn."""
        return bool(seat.pair.newest.permits and seat.pair.newest.turn_ms is None and self._others_wait(seat))

    def _others_wait(self, seat: Seat) -> bool:
        group = self.groups[seat.group]
        waiting = self._waiting + (group.waiting if group.headroom == 0 else 0)
        return waiting > (1 if seat.pair.demand > seat.footprint else 0)

    def _count_waiting(self) -> None:
        for seat in self.seats:
            if seat.pair.demand > seat.footprint:
                self.groups[seat.group].waiting += 1
        self._waiting = sum(group.waiting for group in self.groups.values() if group.headroom > 0)

    def _contended(self, seat: Seat) -> bool:
        return self.account.contended or self.groups[seat.group].contended

    def _over(self, seat: Seat) -> bool:
        """More is counted than the limits allow: nothing is given, not even what counts already (case A12)."""
        group = self.groups[seat.group]
        return self.account.used > self.account.limit or group.used > group.limit

    def _headroom(self, seat: Seat) -> int:
        return min(self.account.headroom, self.groups[seat.group].headroom)

    def _confirm(self) -> None:
        """A claimed grant becomes permits of the same pair, as far as they are still wanted and within the limits."""
        for seat in self.seats:
            if seat.pair.claiming:
                wanted = min(seat.pair.claiming, seat.pair.demand - seat.footprint, self._headroom(seat))
                seat.pair.claiming = 0
                if wanted > 0:
                    self._lease(seat, wanted)

    def _set_targets(self) -> None:
        """Max-min fair shares by progressive filling: all level up together, each to its demand, within each limit."""
        hungry: dict[str, list[Seat]] = {}
        for seat in self.seats:
            seat.target = 0
            if seat.pair.demand > 0:
                hungry.setdefault(seat.group, []).append(seat)
        demands = {group: sum(seat.pair.demand for seat in seats) for group, seats in hungry.items()}
        for scope in (self.account, *self.groups.values()):
            scope.left = scope.limit
        if sum(min(demand, self.groups[group].limit) for group, demand in demands.items()) > self.account.limit:
            self._fill([seat for seat in self.seats if seat.pair.demand > 0])
        else:
            # The account's limit binds nobody, so each group is filled alone; most groups have enough for all.
            for group, seats in hungry.items():
                if demands[group] > self.groups[group].limit:
                    self._fill(seats)
                else:
                    for seat in seats:
                        seat.target = seat.pair.demand
        for seat in self.seats:
            missing = max(0, seat.target - seat.footprint)
            self.account.missing += missing
            self.groups[seat.group].missing += missing

    def _fill(self, hungry: list[Seat]) -> None:
        """Progressive filling: a round for each level at which a pair has its demand or a limit is reached."""
        while hungry and self.account.left > 0:
            hungry = [seat for seat in hungry if seat.target < seat.pair.demand and self.groups[seat.group].left > 0]
            if not hungry:
                break
            scopes = {seat.group: self.groups[seat.group] for seat in hungry}
            for scope in scopes.values():
                scope.open = 0
            for seat in hungry:
                scopes[seat.group].open += 1
            wanted = min(seat.pair.demand - seat.target for seat in hungry)
            free = min(scope.left // scope.open for scope in scopes.values())
            step = min(wanted, free, self.account.left // len(hungry))
            for seat in hungry:
                group = scopes[seat.group]
                share = min(max(step, 1), group.left, self.account.left)
                seat.target += share
                group.left -= share
                self.account.left -= share

    def _lower(self) -> None:
        """Takes leases back to their targets where others miss something, or gives them a turn where too many do."""
        for seat in self.seats:
            group, newest = self.groups[seat.group], seat.pair.newest
            if not newest.permits:
                continue
            over = self._over(seat)
            if not over and self._contended(seat):
                permits = min(newest.permits, max(seat.target, seat.pair.demand))
                self._show(seat, permits, self._begin_turn(seat) if permits else None)
            elif (over or self.account.is_short or group.is_short) and newest.permits > seat.target:
                self._show(seat, seat.target, newest.turn_ms if seat.target else None)

    def _raise(self) -> None:
        """Gives what is free, the pair served longest ago first: a lease to a fresh client, else a grant."""
        raised = []
        for seat in self.seats:
            fresh = self._terms.now_ms - seat.client.reported_at_ms <= self._terms.fresh_ms
            missing = min(seat.target - seat.footprint, self._headroom(seat))
            if missing > 0 and fresh:
                self._lease(seat, missing)
                raised.append(seat)
            elif missing > 0 and not seat.pair.offered:
                self._grant(seat, missing)
            elif fresh and not self._contended(seat) and not seat.pair.offered and not self._over(seat):
                level = min(seat.target, seat.footprint)
                if seat.pair.newest.permits < level:
                    self._show(seat, level, None)
        if raised and all(seat.pair.demand <= seat.footprint for seat in self.seats):
            self._extend(raised)

    def _extend(self, raised: Sequence[Seat]) -> None:
        """Nobody else waits: leases are larger than asked, within a fair share, so that the next need no message."""
        share = self.account.limit // max(1, sum(1 for seat in self.seats if seat.pair.demand or seat.footprint))
        for seat in raised:
            extra = min(self._terms.lease_extra_max, self._headroom(seat), share - seat.footprint)
            if extra > 0 and not seat.pair.offered:
                self._lease(seat, extra)

    def _lease(self, seat: Seat, more: int) -> None:
        turn_ms = self._begin_turn(seat) if self._contended(seat) else None
        self._show(seat, held(seat.pair) + more, turn_ms)
        seat.pair.served = self._terms.version

    def _begin_turn(self, seat: Seat) -> int:
        """Gives the pair a turn, if it has none. Returns its length in ms.

        Each turn costs a hand-over through Kafka, so one that let in few is followed by a longer one.
        """
        pair, terms = seat.pair, self._terms
        if pair.newest.permits and pair.newest.turn_ms is not None:
            return pair.newest.turn_ms
        claims, length_ms = pair.claimed - pair.turn_claimed, pair.turn_ms
        if claims < 0:  # a client counts from 0 again where its group's record was deleted
            length_ms = 0
        elif claims < CLAIMS_A_TURN:
            length_ms *= 2
        elif claims > 2 * CLAIMS_A_TURN:
            length_ms //= 2
        pair.turn_ms = max(terms.turn_ms, min(length_ms, terms.turn_max_ms))
        pair.turn_claimed = pair.claimed
        return pair.turn_ms

    def _grant(self, seat: Seat, number: int) -> None:
        pair, terms = seat.pair, self._terms
        pair.window_ms = pair.window_ms or terms.claim_window_ms
        pair.offered, pair.offered_version = number, terms.version
        pair.offered_until_ms = terms.now_ms + pair.window_ms
        pair.served = terms.version
        seat.client.dirty = True
        self._recount(seat)

    def _show(self, seat: Seat, permits: int, turn_ms: int | None) -> None:
        show(seat.client, seat.pair, self._terms.version, permits, turn_ms)
        self._recount(seat)

    def _recount(self, seat: Seat) -> None:
        before, seat.footprint = seat.footprint, footprint(seat.client, seat.pair)
        self.account.used += seat.footprint - before
        self.groups[seat.group].used += seat.footprint - before
