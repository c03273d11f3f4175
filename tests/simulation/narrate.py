"""The log of a run as a person reads it: one line an event."""

from __future__ import annotations

import json
from typing import Any

from tests.simulation.bus import Stored


def line(at_ms: int, kind: str, what: tuple[Any, ...]) -> str:
    """One event."""
    text = _TELLERS.get(kind, _plain)(*what)
    return f"{at_ms / 1000:9.3f}  {kind:9}  {text}"


def _plain(*what: Any) -> str:
    return " ".join(str(part) for part in what)


def _row(
    service: str, key: str, account: str, group: str, state: str, generation: int, attempt: int, token: Any
) -> str:
    del service, generation
    under = f" under {token}" if token and state == "running" else ""
    return f"{key} is {state}, attempt {attempt}{under} ({account}/{group})"


def _holder(account: str, epoch: int, version: int, pairs: dict[str, tuple[int, int, int]], unknown: list[str]) -> str:
    shown = ", ".join(
        f"{pair} uses {used} counts {counted} waits {wait}" for pair, (used, counted, wait) in pairs.items()
    )
    waits = f"; waits for {', '.join(unknown)}" if unknown else ""
    return f"{account} {epoch}/{version}: {shown or 'nothing'}{waits}"


def _bus(where: str, topic: str, message: Stored | None) -> str:
    if message is None:
        return f"{topic} {where}"
    return f"{topic.partition('.')[2]} {where}: {_message(json.loads(message.value))}"


def _message(document: dict[str, Any]) -> str:
    kind = document.pop("type", "?")
    for name in ("v", "account", "incarnation", "account_limit", "blocked", "by", "why", "declared"):
        document.pop(name, None)
    groups = document.pop("groups", [])
    parts = [f"{name} {value}" for name, value in document.items() if value not in (None, False)]
    parts += [
        " ".join(f"{name}={value}" for name, value in one.items() if value not in (None, 0)) or "(empty)"
        for one in groups
    ]
    return f"{kind} {'; '.join(parts)}"


_TELLERS: dict[str, Any] = {"row": _row, "holder": _holder, "bus": _bus}
