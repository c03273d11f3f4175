"""The folder broker: what kombu's own filesystem transport gets wrong between processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from queue import Empty

import pytest
from kombu import Connection, Exchange, Producer, Queue

from celery_durable import spool

SENDER = """
import sys
from pathlib import Path
from kombu import Connection, Exchange, Producer, Queue
from celery_durable import spool

spool.register()
with Connection(spool.url(Path(sys.argv[1]))) as connection:
    queue = Queue("work", Exchange("work"), "work")
    producer = Producer(connection.channel(), exchange=queue.exchange, routing_key="work")
    for number in range(60):
        producer.publish({"sender": sys.argv[2], "number": number, "filling": "x" * 200_000}, declare=[queue])
"""


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[Connection]:
    spool.register()
    with Connection(spool.url(tmp_path / "broker")) as connection:
        yield connection


@pytest.mark.processes
def test_a_message_is_complete_from_the_moment_it_can_be_seen(connection: Connection, tmp_path: Path) -> None:
    """Two processes send 200 kB messages while this one polls without a pause: none is torn, lost or doubled."""
    queue = connection.SimpleQueue(Queue("work", Exchange("work"), "work"))
    senders = [
        subprocess.Popen([sys.executable, "-c", SENDER, str(tmp_path / "broker"), name]) for name in ("one", "two")
    ]
    got = []
    for _ in range(120):
        message = queue.get(timeout=30)
        got.append((message.payload["sender"], message.payload["number"]))
        message.ack()
    assert [sender.wait(30) for sender in senders] == [0, 0]
    assert sorted(got) == sorted((sender, number) for sender in ("one", "two") for number in range(60))
    # Each sender's own order is kept.
    assert [number for sender, number in got if sender == "one"] == list(range(60))


def test_queue_names_of_any_shape_are_apart(connection: Connection) -> None:
    channel = connection.channel()
    names = ["a", "a.b", "b", "a/b", "..", "ä b", "celery@host.celery.pidbox"]
    for name in names:
        channel._put(name, {"for": name})
    assert [channel._size(name) for name in names] == [1] * len(names)
    assert [channel._get(name) for name in names] == [{"for": name} for name in names]
    with pytest.raises(Empty):
        channel._get("a")


def test_purge_counts_and_empties(connection: Connection) -> None:
    channel = connection.channel()
    for number in range(3):
        channel._put("work", {"number": number})
    assert channel._purge("work") == 3
    assert channel._purge("never used") == 0
    with pytest.raises(Empty):
        channel._get("work")


def test_fanout_reaches_every_bound_queue_until_it_is_deleted(connection: Connection) -> None:
    exchange = Exchange("news", type="fanout")
    channel = connection.channel()
    first, second = (Queue(name, exchange)(channel) for name in ("first", "second"))
    first.declare()
    second.declare()
    producer = Producer(channel, exchange=exchange)
    producer.publish({"n": 1})
    assert (channel._size("first"), channel._size("second")) == (1, 1)
    first.delete()
    producer.publish({"n": 2})
    assert (channel._size("first"), channel._size("second")) == (0, 2)
