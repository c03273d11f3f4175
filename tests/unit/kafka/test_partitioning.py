"""Keys land where the Java clients put them: pinned, since another partitioner would break every account's order."""

from __future__ import annotations

import pytest

from celery_durable.kafka.client import consumer_config, producer_config
from celery_durable.kafka.settings import KafkaSettings
from tests.kafka_parts import partition_of

# murmur2 of the key's bytes, as Apache Kafka's own UtilsTest pins them for Utils.murmur2.
JAVA_HASHES = {
    "21": -973932308,
    "foobar": -790332482,
    "a-little-bit-long-string": -985981536,
    "a-little-bit-longer-string": -1486304829,
    "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    "abc": 479470107,
}
GOLDEN = {"tenant:acme": 0, "tenant:1": 3, "1": 3, "1:2": 2, "naïve ☃ 漢": 4, "x" * 1_024: 5}


@pytest.mark.parametrize("partitions", [1, 4, 12, 100])
@pytest.mark.parametrize("key", JAVA_HASHES)
def test_as_java(key: str, partitions: int) -> None:
    assert partition_of(key, partitions) == (JAVA_HASHES[key] & 0x7FFFFFFF) % partitions


def test_golden_table() -> None:
    """The default of 12 partitions, for keys of every shape (E5)."""
    assert {key: partition_of(key, 12) for key in GOLDEN} == GOLDEN


def test_what_the_protocol_needs_cannot_be_overridden() -> None:
    options = {
        "partitioner": "random",
        "acks": "1",
        "enable.idempotence": False,
        "auto.offset.reset": "latest",
        "enable.auto.commit": True,
        "partition.assignment.strategy": "range",
        "bootstrap.servers": "elsewhere:9092",
        "sasl.username": "me",
    }
    settings = KafkaSettings(kafka_bootstrap_servers="here:9092", kafka_options=options)
    producer, consumer = producer_config(settings), consumer_config(settings, "g")
    assert (producer["partitioner"], producer["acks"], producer["enable.idempotence"]) == (
        "murmur2_random",
        "all",
        True,
    )
    assert (consumer["auto.offset.reset"], consumer["enable.auto.commit"]) == ("error", False)
    assert consumer["partition.assignment.strategy"] == "cooperative-sticky"
    for config in (producer, consumer):
        assert config["bootstrap.servers"] == "here:9092"
        assert config["sasl.username"] == "me"


def test_kip_848_gets_no_setting_of_the_classic_protocol() -> None:
    settings = KafkaSettings(kafka_bootstrap_servers="here:9092", kafka_group_protocol="consumer")
    config = consumer_config(settings, "g")
    assert config["group.protocol"] == "consumer"
    assert not {"session.timeout.ms", "heartbeat.interval.ms", "partition.assignment.strategy"} & set(config)
