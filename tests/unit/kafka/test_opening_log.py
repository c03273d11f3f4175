"""What the log says of a topic that was made anew (case B8)."""

from __future__ import annotations

import logging

import pytest

from celery_durable.kafka.consumer import _log_opening
from celery_durable.kafka.opening import open_partition
from celery_durable.store.offsets import Position


@pytest.mark.parametrize(
    ("topic_id", "level"), [("AAAAAAAAAAAAAAAAAAAAAA", logging.WARNING), ("mockCluster7f3a", logging.INFO)]
)
def test_a_recreated_topic_is_noticed_and_no_surprise_on_the_embedded_broker(
    caplog: pytest.LogCaptureFixture, topic_id: str, level: int
) -> None:
    stored = Position("t", 0, "another topic", 7)
    with caplog.at_level(logging.DEBUG):
        _log_opening("t", open_partition(0, topic_id, 0, 3, stored, None))
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (level, "t [0]: the topic was recreated or cut: reading from its start, offset 0")
    ]
