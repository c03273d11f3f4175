"""Settings of the holder: environment ``HOLDER_*`` and a ``.env`` file."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from celery_durable import configuration
from celery_durable.configuration import CHARACTERS, TABLE_PREFIX, TABLE_PREFIX_WORDS, Configuration, refuse_above
from celery_durable.kafka.settings import KafkaSettings
from celery_durable.permits.messages import Limit
from holder_service.semaphore import Rules, SemaphoreSettings

RuleName = Annotated[str, Field(min_length=1, max_length=1024)]


class HolderSettings(KafkaSettings, Configuration):
    """Every setting of a holder."""

    model_config = SettingsConfigDict(env_prefix="HOLDER_")

    database_url: SecretStr = Field(
        default=SecretStr(""), description="The holder's SQL database: postgresql+psycopg://… or sqlite:///…."
    )
    database_schema: str | None = Field(
        default=None, description="PostgreSQL schema of the tables; none: the connection's own."
    )
    table_prefix: str = Field(
        default="holder_",
        max_length=20,
        pattern=TABLE_PREFIX,
        json_schema_extra={CHARACTERS: TABLE_PREFIX_WORDS},
        description="First part of every table's name.",
    )
    database_pool_size: int = Field(
        default=3,
        ge=1,
        le=100,
        description="SQL connections kept open for transactions at most, and as many for single statements.",
    )
    group_id: str = Field(
        default="celery-durable-holder",
        min_length=1,
        description="Kafka consumer group of all holder instances.",
    )
    batch_max: int = Field(default=500, ge=1, le=10_000, description="Messages merged in one transaction.")
    cache_accounts_max: int = Field(
        default=10_000, ge=1, le=10_000_000, description="Accounts whose rows are kept in memory at most."
    )
    limits: dict[RuleName, Limit] = Field(
        default_factory=dict,
        description="Limits by whole account, by name (the part before ':'), or '*', as JSON.",
    )
    group_limits: dict[RuleName, Limit] = Field(
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
        description="How long a client may go on claiming while others are hungry, first.",
    )
    turn_max_ms: int = Field(
        default=1_000,
        ge=1,
        le=600_000,
        description="The same at most, where turns let in fewer than four operations each. Never below `turn_ms`.",
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

    @field_validator("database_schema", "forfeit_after_s", mode="before")
    @classmethod
    def _empty_is_none(cls, value: Any) -> Any:
        return None if value == "" else value

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        lifetime_s = self.reporting_lifetime_s
        refuse_above("claim_window_s", self.claim_window_s, "claim_window_max_s", self.claim_window_max_s)
        for field in ("turn_ms", "turn_max_ms"):
            refuse_above(field, getattr(self, field), "reporting_lifetime_s", lifetime_s, 1_000)
        if self.forfeit_after_s is not None:
            refuse_above("reporting_lifetime_s", lifetime_s, "forfeit_after_s", self.forfeit_after_s)
        refuse_above("poll_max_ms", self.poll_max_ms, "shutdown_s", self.shutdown_s, 1_000)
        return self

    def semaphore(self) -> SemaphoreSettings:
        """What the pure decisions are given of these settings."""
        return SemaphoreSettings(
            claim_window_ms=round(self.claim_window_s * 1000),
            claim_window_max_ms=round(self.claim_window_max_s * 1000),
            turn_ms=self.turn_ms,
            turn_max_ms=self.turn_max_ms,
            reporting_lifetime_ms=round(self.reporting_lifetime_s * 1000),
            forfeit_after_ms=None if self.forfeit_after_s is None else round(self.forfeit_after_s * 1000),
            rules=Rules(accounts=self.limits, group_limits=self.group_limits),
        )


def load(*, required: Collection[str] = ("database_url",), **overrides: Any) -> HolderSettings:
    """The holder's settings: ``overrides`` over the environment over ``.env`` over the defaults.

    :param required: text settings that must not be empty.
    :raises ConfigurationError: a value is out of bounds, unknown or missing; the message names field, value and remedy.
    """
    return configuration.load(HolderSettings, overrides, required)
