"""librdkafka's mock cluster as the embedded broker of a laptop and of the tests (design, section 13)."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class EmbeddedBroker:
    """A Kafka in this process while the context lasts; other processes connect to :attr:`bootstrap_servers` over TCP.

    It keeps nothing on disk, creates topics on first use with 4 partitions, and has no admin API.
    """

    def __init__(self, brokers: int = 1) -> None:
        raise NotImplementedError

    @property
    def bootstrap_servers(self) -> str:
        """Its address, for ``kafka_bootstrap_servers``. It changes with every start."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raise NotImplementedError
