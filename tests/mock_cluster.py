"""librdkafka's mock cluster with what only C programs reach: partition counts, injected errors, brokers that go down.

For tests only. The embedded broker of :mod:`celery_durable.kafka.embedded` is the same cluster without these.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import confluent_kafka

_PRODUCER = 0


class Request(IntEnum):
    """Numbers of Kafka requests, for :meth:`MockCluster.fail`."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    OFFSET_COMMIT = 8
    OFFSET_FETCH = 9


def _library() -> Any:
    folder = Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs"
    library = ctypes.CDLL(str(next(folder.glob("librdkafka*.so*"))))
    for name in ("conf_new", "new", "mock_cluster_new"):
        getattr(library, f"rd_kafka_{name}").restype = ctypes.c_void_p
    library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
    return library


class MockCluster:
    """A mock cluster of this process; its brokers have the numbers 1, 2, …"""

    def __init__(self, brokers: int = 1) -> None:
        self._library = _library()
        reason = ctypes.create_string_buffer(512)
        config = ctypes.c_void_p(self._library.rd_kafka_conf_new())
        self._library.rd_kafka_conf_set(config, b"log_level", b"3", reason, ctypes.c_size_t(len(reason)))
        self._client = self._library.rd_kafka_new(_PRODUCER, config, reason, ctypes.c_size_t(len(reason)))
        if not self._client:
            raise RuntimeError(reason.value.decode())
        self._cluster = ctypes.c_void_p(
            self._library.rd_kafka_mock_cluster_new(ctypes.c_void_p(self._client), ctypes.c_int(brokers))
        )
        # By default a group's first member waits three seconds for others, and a KIP-848 member is told as late.
        self._library.rd_kafka_mock_group_initial_rebalance_delay_ms(self._cluster, ctypes.c_int32(0))
        self._library.rd_kafka_mock_set_group_consumer_heartbeat_interval_ms(self._cluster, ctypes.c_int(200))
        self._library.rd_kafka_mock_set_group_consumer_session_timeout_ms(self._cluster, ctypes.c_int(1_500))

    @property
    def bootstrap_servers(self) -> str:
        """Its address."""
        address: bytes = self._library.rd_kafka_mock_cluster_bootstraps(self._cluster)
        return address.decode()

    def create_topic(self, name: str, partitions: int) -> None:
        """Makes a topic; others are made on first use, with 4 partitions."""
        self._call("topic_create", name.encode(), ctypes.c_int(partitions), ctypes.c_int(1))

    def lead(self, topic: str, partition: int, broker: int) -> None:
        """Makes ``broker`` the leader of a partition."""
        self._call("partition_set_leader", topic.encode(), ctypes.c_int32(partition), ctypes.c_int32(broker))

    def down(self, broker: int) -> None:
        """Ends all connections to the broker and refuses new ones."""
        self._call("broker_set_down", ctypes.c_int32(broker))

    def up(self, broker: int) -> None:
        """Takes connections again; the broker still has its log."""
        self._call("broker_set_up", ctypes.c_int32(broker))

    def slow(self, broker: int, rtt_ms: int) -> None:
        """Answers every request of the broker so much later."""
        self._call("broker_set_rtt", ctypes.c_int32(broker), ctypes.c_int(rtt_ms))

    def fail(self, request: Request, errors: Sequence[int]) -> None:
        """The next requests of a kind get these errors (0: none), one each."""
        array = (ctypes.c_int * len(errors))(*errors)
        self._call(
            "push_request_errors_array", ctypes.c_int16(request), ctypes.c_size_t(len(errors)), ctypes.byref(array)
        )

    def fail_topic(self, name: str, error: int) -> None:
        """Every request for the topic gets this error (0: none)."""
        self._library.rd_kafka_mock_topic_set_error(self._cluster, name.encode(), ctypes.c_int(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._library.rd_kafka_mock_cluster_destroy(self._cluster)
        self._library.rd_kafka_destroy(ctypes.c_void_p(self._client))

    def _call(self, function: str, *arguments: Any) -> None:
        error = getattr(self._library, f"rd_kafka_mock_{function}")(self._cluster, *arguments)
        if error:
            raise RuntimeError(f"rd_kafka_mock_{function}: error {error}")
