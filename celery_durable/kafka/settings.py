"""Settings of Kafka that a service and a holder share."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from celery_durable.configuration import CHARACTERS, refuse_above

NAME_CHARACTERS = "a-zA-Z0-9._-"
"""What Kafka allows in a topic's name, as regular expressions write it; so in a client_id, which is part of one."""
NAME_CHARACTERS_WORDS = "letters, digits, '.', '_' and '-'"
CLIENT_ID_CHARACTERS_MAX = 100


class KafkaSettings(BaseModel):
    """Mixed into both settings models: fields ``kafka_*`` and the names of the topics."""

    kafka_bootstrap_servers: str = Field(
        default="",
        description="Kafka's addresses, host:port separated by commas. Empty: Kafka is not used by this process.",
    )
    kafka_options: dict[str, Any] = Field(
        default_factory=dict,
        repr=False,
        description="Further librdkafka settings (security.protocol, sasl.*, "
        "ssl.*, …), given to every client as they are.",
    )
    kafka_group_protocol: Literal["classic", "consumer"] = Field(
        default="classic",
        description="Group protocol: classic (cooperative-sticky) or consumer (KIP-848, brokers 4.0 and later).",
    )
    kafka_session_timeout_ms: int = Field(
        default=10_000,
        ge=1_000,
        le=300_000,
        description="A consumer that is silent this long loses its partitions. With the group protocol consumer "
        "the broker's group.consumer.session.timeout.ms (45 s by default) counts instead.",
    )
    kafka_max_poll_interval_ms: int = Field(
        default=60_000,
        ge=10_000,
        le=3_600_000,
        description="A consumer that does not poll this long loses its partitions.",
    )
    kafka_fetch_wait_max_ms: int = Field(
        default=100,
        ge=1,
        le=10_000,
        description="How long the broker may hold a fetch that finds nothing. "
        "The embedded broker never wakes one: use 30 there.",
    )
    kafka_linger_ms: int = Field(default=1, ge=0, le=1_000, description="How long the producer gathers a batch.")
    kafka_publish_deadline_ms: int = Field(
        default=10_000,
        ge=100,
        le=300_000,
        description="A message that Kafka has not acknowledged after this long "
        "is sent again later; a hung broker stalls no pass.",
    )
    topic_prefix: str = Field(
        default="celery-durable",
        min_length=1,
        max_length=200,
        pattern=rf"^[{NAME_CHARACTERS}]+$",
        json_schema_extra={CHARACTERS: NAME_CHARACTERS_WORDS},
        description="First part of every topic's name.",
    )

    @model_validator(mode="after")
    def _kafka_combinations(self) -> Self:
        session_ms, poll_ms = self.kafka_session_timeout_ms, self.kafka_max_poll_interval_ms
        refuse_above("kafka_session_timeout_ms", session_ms, "kafka_max_poll_interval_ms", poll_ms)
        deadline_ms = self.kafka_publish_deadline_ms
        refuse_above("kafka_linger_ms", self.kafka_linger_ms, "kafka_publish_deadline_ms", deadline_ms, 0.5, "half of ")
        return self

    @property
    def accounts_topic(self) -> str:
        """Reports and commands, keyed by account."""
        return f"{self.topic_prefix}.accounts"

    @property
    def limits_topic(self) -> str:
        """The compacted mirror of commands that are in force."""
        return f"{self.topic_prefix}.limits"

    @property
    def events_topic(self) -> str:
        """Optional lifecycle events."""
        return f"{self.topic_prefix}.events"

    @property
    def dead_letters_topic(self) -> str:
        """Messages that could not be read, with the reason in headers."""
        return f"{self.topic_prefix}.dead-letters"

    def replies_topic(self, client_id: str) -> str:
        """The replies to one client."""
        return f"{self.topic_prefix}.replies.{client_id}"
