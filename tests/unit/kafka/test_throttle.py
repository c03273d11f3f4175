"""What a fault of Kafka says without end is said once in a while, and as a warning only if it lasts."""

from __future__ import annotations

import logging

import pytest

from celery_durable.kafka import throttle
from celery_durable.kafka.throttle import NotRepeated, Throttled


class Clock:
    """Monotonic time that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(throttle, "time", clock)
    return clock


def test_a_repeated_record_is_let_through_once_in_a_while(clock: Clock) -> None:
    allowed = NotRepeated(interval_s=60)

    def logged(text: str) -> bool:
        return allowed.filter(logging.LogRecord("rdkafka", logging.ERROR, "", 0, "%s", (text,), None))

    assert logged("Connect failed after 0ms")
    assert not logged("Connect failed after 17ms")
    assert logged("Authentication failed")
    clock.now = 161.0
    assert logged("Connect failed after 3ms")


def test_a_lost_connection_of_librdkafka_is_an_error_only_if_it_lasts(clock: Clock) -> None:
    allowed = NotRepeated(interval_s=60)
    logger = logging.getLogger("rdkafka-of-the-test")
    logger.setLevel(logging.INFO)

    def level() -> str | None:
        text = "FAIL [rdkafka#producer-1] 127.0.0.1:9092/1: Connect to ipv4#127.0.0.1:9092 failed (after 3ms)"
        record = logging.LogRecord(logger.name, logging.ERROR, "", 0, "%s", (text,), None)
        return record.levelname if allowed.filter(record) else None

    assert [level(), level()] == ["INFO", None]
    clock.now += 6
    assert [level(), level()] == ["ERROR", None]
    logger.setLevel(logging.WARNING)
    clock.now += 200
    assert level() is None


def test_a_fault_is_a_warning_if_it_lasts_and_then_once_a_minute(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Throttled(logging.getLogger("faults-of-the-test"), interval_s=60)
    with caplog.at_level(logging.INFO):
        for seconds in range(0, 200, 2):
            clock.now = 100.0 + seconds
            faults.warning("a", "at %d", seconds)
        faults.warning("b", "another")
        clock.now += 100
        faults.warning("a", "anew")
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said == [
        ("INFO", "at 0"),
        ("WARNING", "at 6"),
        ("WARNING", "at 66"),
        ("WARNING", "at 126"),
        ("WARNING", "at 186"),
        ("INFO", "another"),
        ("INFO", "anew"),
    ]
