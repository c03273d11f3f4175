"""librdkafka's mock cluster as the embedded broker of a laptop and of the tests (design, section 13)."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from confluent_kafka import Producer

_START_S = 10.0


class EmbeddedBroker:
    """A Kafka in this process while the context lasts; other processes connect to :attr:`bootstrap_servers` over TCP.

    It keeps nothing on disk, creates topics on first use with 4 partitions, and has no admin API.

    :param brokers: how many brokers the cluster has.
    """

    def __init__(self, brokers: int = 1) -> None:
        self._brokers = brokers
        self._cluster: Producer | None = None
        self._bootstrap_servers = ""

    @property
    def bootstrap_servers(self) -> str:
        """Its address, for ``kafka_bootstrap_servers``, while it runs. It changes with every start."""
        if self._cluster is None:
            raise RuntimeError("the embedded broker does not run: use it as a context manager")
        return self._bootstrap_servers

    def __enter__(self) -> Self:
        # The mock cluster replaces this address by its own; librdkafka says so at level notice.
        config = {"bootstrap.servers": "embedded", "test.mock.num.brokers": self._brokers, "log_level": 3}
        self._cluster = Producer(config)
        found = self._cluster.list_topics(timeout=_START_S).brokers.values()
        self._bootstrap_servers = ",".join(sorted(f"{broker.host}:{broker.port}" for broker in found))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The cluster ends with the client that made it, when nothing refers to that any more.
        self._cluster = None
