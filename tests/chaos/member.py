"""A bare member of a consumer group, to measure what Kafka itself takes to replace a dead one.

``python -m tests.chaos.member BOOTSTRAP GROUP TOPIC SETTINGS`` prints how many partitions it has whenever that changes.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from confluent_kafka import Consumer, TopicPartition


def main(bootstrap_servers: str, group: str, topic: str, settings: dict[str, Any]) -> None:
    """Polls for ever."""
    owned: set[int] = set()

    def assigned(_consumer: Consumer, partitions: list[TopicPartition]) -> None:
        owned.update(partition.partition for partition in partitions)
        print(len(owned), flush=True)

    def revoked(_consumer: Consumer, partitions: list[TopicPartition]) -> None:
        owned.difference_update(partition.partition for partition in partitions)
        print(len(owned), flush=True)

    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": group, **settings})
    consumer.subscribe([topic], on_assign=assigned, on_revoke=revoked, on_lost=revoked)
    while True:
        consumer.poll(0.1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
