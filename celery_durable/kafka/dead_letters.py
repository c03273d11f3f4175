"""What becomes of a message that cannot be read: it goes to the dead-letter topic with the reason (case B7)."""

from __future__ import annotations

import logging

from pydantic import ValidationError

from celery_durable.kafka.received import Received
from celery_durable.kafka.settings import KafkaSettings
from celery_durable.store.outbox import Staged

logger = logging.getLogger(__name__)

BODY_BYTES_MAX = 200_000
"""So much of a refused message is kept, so that the dead letter itself fits into Kafka's default message size."""
KEY_CHARACTERS_MAX = 2_000
REASON_CHARACTERS_MAX = 500
_PROBLEMS_MAX = 3


def dead_letter(settings: KafkaSettings, message: Received, reason: str) -> Staged:
    """The dead letter of ``message``, to stage in the transaction that moves its partition's offset. Logs it too.

    Headers: ``reason``, ``topic``, ``partition``, ``offset``, and ``truncated_from_bytes`` where only a first part of
    the body was kept.
    """
    logger.warning(
        "%s [%d] offset %d: refused, goes to the dead letters: %s",
        message.topic,
        message.partition,
        message.offset,
        reason,
    )
    body = message.value or b""
    headers = {
        "reason": reason[:REASON_CHARACTERS_MAX],
        "topic": message.topic,
        "partition": str(message.partition),
        "offset": str(message.offset),
    }
    if len(body) > BODY_BYTES_MAX:
        headers["truncated_from_bytes"] = str(len(body))
    # A column of text holds no NUL and no byte that is not UTF-8; where the key had one, it is shown escaped.
    key = (message.key or b"").decode(errors="backslashreplace").replace("\x00", "\\x00")
    return Staged(settings.dead_letters_topic, key[:KEY_CHARACTERS_MAX], body[:BODY_BYTES_MAX], headers=headers)


def why_unreadable(error: ValidationError) -> str:
    """A pydantic error as one line, without the input."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    lines = [f"{'.'.join(map(str, one['loc'])) or 'message'}: {one['msg']}" for one in problems[:_PROBLEMS_MAX]]
    if len(problems) > _PROBLEMS_MAX:
        lines.append(f"and {len(problems) - _PROBLEMS_MAX} more")
    return "; ".join(lines)
