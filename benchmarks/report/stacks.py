"""Sampled stacks, summed up: which functions were on the processor, by themselves and with what they called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Shares:
    """Samples by function."""

    total: int = 0
    itself: Counter[str] = field(default_factory=Counter)
    """The function was at the top of the stack."""
    within: Counter[str] = field(default_factory=Counter)
    """The function was anywhere in it."""

    def top(self, counts: Counter[str], number: int, only: str = "") -> list[tuple[str, float]]:
        """The largest shares (0 to 1), of functions whose file's name contains ``only``."""
        chosen = [(name, count) for name, count in counts.most_common() if only in name]
        return [(name, count / self.total) for name, count in chosen[:number]]


def sum_up(lines: Iterable[str]) -> Shares:
    """Sums lines of ``outermost (file);…;innermost (file) samples``, py-spy's format ``raw``.

    :raises ValueError: a line has no number of samples.
    """
    shares = Shares()
    for line in filter(str.strip, lines):
        stack, _, number = line.rstrip().rpartition(" ")
        frames = [frame for frame in stack.split(";") if not frame.startswith(("process ", "thread "))]
        samples = int(number)
        shares.total += samples
        if frames:
            shares.itself[frames[-1]] += samples
        for frame in set(frames):
            shares.within[frame] += samples
    return shares
