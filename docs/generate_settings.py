"""Writes ``docs/settings.md`` from the settings models: ``make docs-settings``. A test fails when the file is stale."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from celery_durable.settings import Settings
from holder_service.settings import HolderSettings

FILE = Path(__file__).with_name("settings.md")

_INTRODUCTION = """# Settings

<!-- Written by `make docs-settings` from the settings models: change those. -->

Units are last in a name: `_s` seconds, `_ms` milliseconds. A value out of its bounds, an unknown name and an impossible
combination are refused at start, in one line that names field, value and remedy.
"""
_SERVICE = """## A service

Environment `CELERY_DURABLE_<NAME>`, in capitals, or a `.env` file; `app.conf.durable`, a dictionary with the names
below, wins over both. Dictionaries are given as JSON in the environment.
"""
_BOUNDS = {
    "gt": "> {}",
    "ge": "≥ {}",
    "lt": "< {}",
    "le": "≤ {}",
    "min_length": "characters ≥ {}",
    "max_length": "characters ≤ {}",
    "pattern": "{}",
}
"""How a bound of annotated-types or pydantic is written, by the attribute that holds it."""
_HOLDER = """## A holder

Environment `HOLDER_<NAME>`, in capitals, or a `.env` file. Dictionaries are given as JSON.
"""


def render() -> str:
    """The whole file."""
    return "\n".join([_INTRODUCTION, _SERVICE, _table(Settings), _HOLDER, _table(HolderSettings)])


def _table(model: type[BaseSettings]) -> str:
    lines = ["| name | default | bounds | what it does |", "| --- | --- | --- | --- |"]
    # A model's own fields first, then those of Kafka that it inherits.
    own = [name for name in model.model_fields if not name.startswith(("kafka_", "topic_"))]
    for name in [*own, *(name for name in model.model_fields if name not in own)]:
        field = model.model_fields[name]
        cells = [f"`{name}`", _default(field), _bounds(field), (field.description or "").replace("|", "\\|")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if value is None or value == "":
        return "none"
    return f"`{value:.10g}`" if isinstance(value, float) else f"`{value}`"


def _bounds(field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(field.annotation))
    parts = [text for text in (_bound(rule) for rule in field.metadata) if text]
    return ", ".join(parts)


def _bound(rule: Any) -> str:
    for attribute, words in _BOUNDS.items():
        value = getattr(rule, attribute, None)
        if value is not None:
            shown = f"{value:,}" if isinstance(value, int | float) else f"`{value}`".replace("|", "\\|")
            return words.format(shown)
    return ""


if __name__ == "__main__":
    FILE.write_text(render())
