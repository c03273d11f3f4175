"""What must hold of permits, written once and used by every stage of the tests.

Each check counts that it looked at something; :meth:`Invariants.require` fails a test whose checks never did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Pair = tuple[str, str]
"""(client, group) within one account."""


class InvariantViolation(AssertionError):
    """Something that must never happen did."""


@dataclass
class Invariants:
    """The checks, with a memory where one compares with before."""

    looked: Counter[str] = field(default_factory=Counter)
    _newest: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    _behind: dict[Pair, int] = field(default_factory=dict)
    _passed: dict[tuple[str, Pair], int] = field(default_factory=dict)
    _bodies: dict[str, bytes] = field(default_factory=dict)

    def bound(self, in_use: Mapping[Pair, int], limit: int, group_limits: Mapping[str, int]) -> None:
        """No more is in use than the account's limit and each group's, at this instant."""
        total = sum(in_use.values())
        self._check("bound", total <= limit, f"{total} in use at limit {limit}: {dict(in_use)}", total > 0)
        for group, group_limit in group_limits.items():
            used = sum(count for (_, name), count in in_use.items() if name == group)
            message = f"{used} in use in group {group!r} at its limit {group_limit}"
            self._check("group bound", used <= group_limit, message, used > 0)

    def bodies(self, running: Mapping[str, int], limit: int, group_limits: Mapping[str, int]) -> None:
        """No more bodies of an account run, at this instant, than its limit and each group's. ``running``: by group."""
        total = sum(running.values())
        self._check("bodies", total <= limit, f"{total} bodies run at limit {limit}: {dict(running)}", total > 0)
        for group, count in running.items():
            group_limit = group_limits.get(group)
            if group_limit is not None:
                message = f"{count} bodies of group {group!r} run at its limit {group_limit}"
                self._check("group bodies", count <= group_limit, message)

    def claim(self, pair: Pair, *, in_use: int, permits: int, claimed: int, claims: int | None) -> None:
        """A claim was within the level and the ceiling of what the client was given. Values after the claim."""
        self._check("level", in_use <= permits, f"{pair}: {in_use} in use of {permits} permits after a claim")
        if claims is not None:
            self._check("ceiling", claimed <= claims, f"{pair}: claim number {claimed} at a ceiling of {claims}")

    def grows(self, what: str, of: str, value: tuple[int, ...], *, strictly: bool = False) -> None:
        """Versions, epochs and sequence numbers never go back."""
        before = self._newest.get((what, of))
        ok = before is None or (value > before if strictly else value >= before)
        self._check(what, ok, f"{what} of {of} went from {before} to {value}", before is not None)
        self._newest[what, of] = value

    def covers(self, footprint: Mapping[Pair, int], in_use: Mapping[Pair, int]) -> None:
        """The holder counts at least what is in use, for every pair."""
        for pair, used in in_use.items():
            counted = footprint.get(pair, 0)
            self._check("covers", used <= counted, f"{pair}: {used} in use, {counted} counted", used > 0)

    def quiet(self, footprint: int, in_use: int, waiting: int, rows: Iterable[str]) -> None:
        """At quiescence all has run, what is counted is what is in use (nothing), and no row is left."""
        self._check("all ran", waiting == 0, f"{waiting} operations still wait though faults have stopped")
        self._check("quiescence", footprint == in_use == 0, f"footprint {footprint} with {in_use} in use")
        left = list(rows)
        self._check("rows", not left, f"rows of an idle account are left: {left}")

    def admitted(self, pair: Pair, waiting: Iterable[Pair], *, most: int) -> None:
        """No pair that waits is passed over while ``most`` others are admitted."""
        for other in [other for other in self._behind if other not in (waiting := set(waiting))]:
            del self._behind[other]
        self._behind.pop(pair, None)
        for other in waiting:
            if other != pair:
                behind = self._behind[other] = self._behind.get(other, 0) + 1
                self._check("starves", behind <= most, f"{other} waits while {behind} others were admitted")

    def served(self, account: str, pairs: Collection[Pair], hungry: Iterable[Pair], *, most: int) -> None:
        """No pair that wants a permit and has none is passed over while others are served more than ``most`` times."""
        wanting = set(hungry)
        for key in [key for key in self._passed if key[0] == account and key[1] not in wanting]:
            del self._passed[key]
        for other in sorted(wanting):
            times = self._passed[account, other] = self._passed.get((account, other), 0) + len(pairs)
            message = f"{other} has nothing while others of {account} were served {times} times"
            self._check("passed over", times <= most, message, bool(pairs))

    def at_its_version(self, account: str, version: int | None, expected: int | None) -> None:
        """A holder writes an account at the version that it read: no other holder has written it in between."""
        message = f"{account} was written at version {version}, and is at {expected}"
        self._check("at its version", version == expected, message, expected is not None)

    def ended_stays(self, operation: str, before: str, after: str, ended: Sequence[str]) -> None:
        """An operation that has ended stays as it ended."""
        message = f"{operation} had ended as {before}, and is {after}"
        self._check("ended stays", before not in ended or after == before, message, before in ended)

    def kept(self, operation: str, state: str, ended: Sequence[str]) -> None:
        """Only an operation that has ended may be deleted: none is lost."""
        self._check("kept", state in ended, f"{operation} is gone; it was {state}")

    def overdue(self, operation: str, alive_until_ms: int | None, now_ms: int) -> None:
        """An attempt is taken from its worker only when its heartbeats are overdue."""
        holds = alive_until_ms is None or alive_until_ms <= now_ms
        self._check("overdue", holds, f"{operation} was taken {(alive_until_ms or 0) - now_ms} ms before its time")

    def caused(self, operation: str, attempt: int, cause: str | None) -> None:
        """An attempt after the first, or one that is made twice, has a cause in the record of the one before."""
        self._check("caused", cause is not None, f"attempt {attempt} of {operation} ran without a cause")

    def told(self, operation: str, state: str, told: str | None) -> None:
        """What ended is told to the app's own result backend, as it ended."""
        self._check("told", told == state, f"{operation} is {state}, and the result backend knows {told}")

    def right_end(self, operation: str, state: str, holds: bool) -> None:
        """An operation succeeds or fails as its body did, fails for too many losses, or is cancelled as was asked."""
        self._check("right end", holds, f"{operation} is {state} without a reason")

    def not_over(self, account: str, counted: int, limit: int, more: int) -> None:
        """While more is counted in an account than its limit, no decision gives anybody more."""
        message = f"{account}: {more} more given though {counted} are counted at limit {limit}"
        self._check("over", counted <= limit or more <= 0, message, counted > limit)

    def fenced(self, operation: str, holds: bool, message: str) -> None:
        """A worker changes nothing but the attempt that its token is of."""
        self._check("fenced", holds, f"{operation}: {message}")

    def read_once(self, partition: str, offset: int, expected: int) -> None:
        """A batch begins where the last committed one of its partition ended: no other holder has committed between."""
        self._check("read once", offset >= expected, f"{partition}: offset {offset} was committed before ({expected})")

    def noticed(self, epoch: int, expected: int) -> None:
        """A holder whose database went back in time has begun a new epoch."""
        self._check("noticed", epoch >= expected, f"epoch {epoch} of an old copy, which nobody noticed", expected > 0)

    def one_body(self, message: str, body: bytes) -> None:
        """One number of a sequence is one message, however often it is sent."""
        known = self._bodies.setdefault(message, body)
        self._check("one body", known == body, f"{message} is two: {known!r} and {body!r}", known is not body)

    def require(self, *names: str) -> None:
        """Fails unless each of these checks looked at something."""
        blind = [name for name in names if not self.looked[name]]
        assert not blind, f"checks that never looked at anything: {blind}"

    def _check(self, name: str, holds: bool, message: str, looked: bool = True) -> None:
        if looked:
            self.looked[name] += 1
        if not holds:
            raise InvariantViolation(f"{name}: {message}")
