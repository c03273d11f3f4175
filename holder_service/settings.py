"""Settings of the holder: environment ``HOLDER_*`` and a ``.env`` file."""

from __future__ import annotations

from typing import Any

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from celery_durable.kafka.settings import KafkaSettings


class HolderSettings(KafkaSettings, BaseSettings):
    """Every setting of a holder. Units are last in a name: ``_s`` seconds, ``_ms`` milliseconds."""

    model_config = SettingsConfigDict(
        env_prefix="HOLDER_", env_file=".env", extra="ignore", frozen=True, validate_default=True
    )

    database_url: SecretStr = Field(
        default=SecretStr(""), description="The holder's SQL database: postgresql+psycopg://… or sqlite:///…."
    )
    database_schema: str | None = Field(
        default=None, description="PostgreSQL schema of the tables; none: the connection's own."
    )
    table_prefix: str = Field(
        default="holder_",
        max_length=20,
        pattern=r"^[a-z_][a-z0-9_]*$",
        description="First part of every table's name.",
    )
    database_pool_size: int = Field(default=3, ge=1, le=100, description="SQL connections kept open at most.")
    group_id: str = Field(
        default="celery-durable-holder",
        min_length=1,
        description="Kafka consumer group of all holder instances.",
    )
    batch_max: int = Field(default=500, ge=1, le=10_000, description="Messages merged in one transaction.")
    limits: dict[str, int] = Field(
        default_factory=dict,
        description="Limits by whole account, by name (the part before ':'), or '*', as JSON.",
    )
    group_limits: dict[str, int] = Field(
        default_factory=dict, description="The same for the limit of each group of an account."
    )
    claim_window_s: float = Field(
        default=10.0, gt=0, le=600, description="How long a grant waits to be claimed, first."
    )
    claim_window_max_s: float = Field(
        default=600.0, gt=0, le=86_400, description="How long a grant waits to be claimed, at most."
    )
    turn_ms: int = Field(
        default=200,
        ge=1,
        le=600_000,
        description="How long a client may go on claiming while others are hungry.",
    )
    reporting_lifetime_s: float = Field(
        default=600.0, ge=10, le=86_400, description="A client silent this long is ordered to stop claiming."
    )
    forfeit_after_s: float | None = Field(
        default=None,
        ge=60,
        description="Frees a silent client's permits after this long. The bound is then best effort; none: never.",
    )
    replies_partitions: int = Field(
        default=4,
        ge=1,
        le=1_000,
        description="Partitions of a client's replies topic that `topics apply` creates.",
    )
    relay_batch_max: int = Field(default=1_000, ge=1, le=10_000, description="Outbox rows sent to Kafka in one batch.")
    poll_max_ms: int = Field(
        default=250, ge=1, le=600_000, description="Longest pause of the holder's loops, when idle."
    )
    shutdown_s: float = Field(default=5.0, gt=0, le=600, description="How long a holder may take to end after SIGTERM.")


def load(**overrides: Any) -> HolderSettings:
    """The holder's settings. Raises :class:`ConfigurationError` naming field, value and remedy."""
    raise NotImplementedError
