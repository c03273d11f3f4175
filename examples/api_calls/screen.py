"""What the demo shows: a live table on a terminal, plain lines in a pipe."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from examples.api_calls.api import Witness
from examples.api_calls.jobs import LIMITS, WORKFLOW_LIMITS
from examples.api_calls.progress import Progress, TenantProgress

PLAIN_EVERY_S = 2.0
EVENTS_SHOWN = 6


class Screen(Protocol):
    """Where the demo tells what happens."""

    def say(self, text: str) -> None:
        """Something happened."""

    def show(self, progress: Progress, witness: Witness, total: int) -> None:
        """The state now; called a few times a second."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class PlainScreen:
    """One line for each event, and one every two seconds for the state."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._shown = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def say(self, text: str) -> None:
        """Prints the event."""
        self._print(text)

    def show(self, progress: Progress, witness: Witness, total: int) -> None:
        """Prints the state if the last time is two seconds ago."""
        if time.monotonic() - self._shown < PLAIN_EVERY_S:
            return
        self._shown = time.monotonic()
        tenants = "  ".join(
            f"{tenant} {witness.now(tenant)}/{limit} (most {witness.most(tenant)})" for tenant, limit in LIMITS.items()
        )
        self._print(f"{progress.ended}/{total} done  in flight: {tenants}")

    def _print(self, text: str) -> None:
        self._console.print(f"{time.monotonic() - self._started:5.1f} s  {text}", soft_wrap=True, markup=False)


class LiveScreen:
    """A table that is redrawn in place, with the last events below it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._events: deque[Text] = deque(maxlen=EVENTS_SHOWN)
        self._table: Table | Text = Text("")
        self._live = Live(console=console, refresh_per_second=8, transient=True, get_renderable=self._render)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        self._console.print(*self._events, sep="\n")

    def say(self, text: str) -> None:
        """Adds the event to the list."""
        self._events.append(Text(f"{time.monotonic() - self._started:5.1f} s  {text}", style="yellow"))

    def show(self, progress: Progress, witness: Witness, total: int) -> None:
        """Redraws the table."""
        title = f"{progress.ended} of {total} calls done, {time.monotonic() - self._started:.0f} s"
        self._table = table(progress, witness, title)

    def _render(self) -> Group:
        return Group(self._table, *self._events)


def screen_for(console: Console) -> Screen:
    """The live screen on a terminal, else the plain one."""
    return LiveScreen(console) if console.is_terminal else PlainScreen(console)


def table(progress: Progress, witness: Witness, title: str) -> Table:
    """The tenants and the workflow with a limit of its own."""
    shown = Table(title=title, title_style="bold", title_justify="left")
    shown.add_column("tenant", min_width=14)
    for name in ("limit", "in flight", "most", "done", "retried", "waiting"):  # as wide as 80 columns allow
        shown.add_column(name, justify="right")
    shown.add_column("", min_width=max(LIMITS.values()))
    for tenant, limit in LIMITS.items():
        _add(shown, tenant, limit, witness.now(tenant), witness.most(tenant), progress.of(tenant))
        for (owner, workflow), workflow_limit in WORKFLOW_LIMITS.items():
            if owner == tenant:
                now, most = witness.now(tenant, workflow), witness.most(tenant, workflow)
                _add(shown, f"  {workflow}", workflow_limit, now, most, progress.of(tenant, workflow))
    return shown


def _add(shown: Table, name: str, limit: int, now: int, most: int, counts: TenantProgress) -> None:
    style = "bold red" if most > limit else "green" if now == limit else ""
    shown.add_row(
        Text(name, style="dim" if name.startswith(" ") else "bold"),
        str(limit),
        Text(str(now), style=style),
        Text(str(most), style="bold red" if most > limit else ""),
        str(counts.done),
        str(counts.retried or ""),
        str(counts.waiting),
        Text("█" * min(now, limit) + "░" * max(0, limit - now), style="cyan"),
    )
