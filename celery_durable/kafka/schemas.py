"""The messages as JSON Schemas, for other languages: ``make schemas`` writes them to ``topics/schemas``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from celery_durable.permits.messages import (
    AccountReply,
    AccountReport,
    Forfeit,
    LimitMirror,
    Message,
    Pause,
    Resume,
    SetLimit,
)

MESSAGES: tuple[type[Message], ...] = (AccountReport, AccountReply, SetLimit, Pause, Resume, Forfeit, LimitMirror)
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schemas() -> dict[str, str]:
    """The schema of each message as text, by file name. The same code always gives the same text."""
    return {
        f"{message.__name__}.json": json.dumps(
            {"$schema": DIALECT, **message.model_json_schema()}, indent=2, ensure_ascii=False
        )
        + "\n"
        for message in MESSAGES
    }


def export(folder: Path) -> None:
    """Writes every schema to ``folder`` and removes those of messages that no longer exist."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = schemas()
    for old in folder.glob("*.json"):
        if old.name not in texts:
            old.unlink()
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    export(Path(sys.argv[1] if len(sys.argv) > 1 else "topics/schemas"))
