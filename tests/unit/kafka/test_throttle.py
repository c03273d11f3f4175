"""What a library repeats without end is said once in a while."""

from __future__ import annotations

import logging

import pytest

from celery_durable.kafka import throttle
from celery_durable.kafka.throttle import NotRepeated


def test_a_repeated_record_is_let_through_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(throttle.time, "monotonic", lambda: now)
    allowed = NotRepeated(interval_s=60)

    def logged(text: str) -> bool:
        return allowed.filter(logging.LogRecord("rdkafka", logging.ERROR, "", 0, "%s", (text,), None))

    assert logged("Connect failed after 0ms")
    assert not logged("Connect failed after 17ms")
    assert logged("Authentication failed")
    now = 161.0
    assert logged("Connect failed after 3ms")
