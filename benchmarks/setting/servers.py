"""The servers of a run: PostgreSQL with durable commits, Redis and Apache Kafka, each started on first use."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

import psycopg

from tests.harness import Kafka, Stack
from tests.services import PostgreSQL, Redis, start_kafka
from tests.services.postgresql import fresh_database


class Servers:
    """Starts what is asked for, and stops it with ``handles``.

    :param postgresql: further settings of PostgreSQL.
    """

    def __init__(self, handles: ExitStack, postgresql: dict[str, str] | None = None) -> None:
        self._handles = handles
        self._postgresql = {"synchronous_commit": "on", **(postgresql or {})}
        self._numbers = itertools.count(1)

    @cached_property
    def postgresql(self) -> str:
        """The SQLAlchemy URL of a server with fsync and synchronous_commit on."""
        url = self._handles.enter_context(PostgreSQL(self._postgresql)).url()
        with psycopg.connect(url.replace("+psycopg", "")) as connection:
            for name in ("fsync", "synchronous_commit", "full_page_writes"):
                shown = connection.execute(f"SHOW {name}").fetchone()
                if shown != ("on",):
                    raise RuntimeError(f"PostgreSQL: {name} is {shown}, not on")
        return url

    @cached_property
    def _redis(self) -> Redis:
        return self._handles.enter_context(Redis())

    @cached_property
    def kafka(self) -> Kafka:
        """An Apache Kafka; each stack has topics of its own in it."""
        broker = start_kafka(mock=False)
        self._handles.callback(broker.stop)
        return Kafka(broker.bootstrap_servers, broker.kind)

    def new_redis(self) -> str:
        """The URL of an empty Redis database."""
        return self._redis.url(next(self._numbers))

    @contextlib.contextmanager
    def new_database(self) -> Iterator[str]:
        """The URL of an empty database on the one server; dropped at the end."""
        with fresh_database(self.postgresql) as url:
            yield url

    @contextlib.contextmanager
    def stack(self) -> Iterator[Stack]:
        """Databases, brokers and topics for our own processes."""
        kafka = Kafka(self.kafka.bootstrap_servers, self.kafka.kind, Kafka.new_prefix())
        redis = (self._redis.url(0).rpartition("/")[0], self._numbers)
        with (
            tempfile.TemporaryDirectory(prefix="celery-durable-bench-") as folder,
            Stack(Path(folder), kafka=kafka, postgresql=self.postgresql, redis=redis) as stack,
        ):
            yield stack
