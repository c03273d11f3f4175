"""Settings of a service: environment ``CELERY_DURABLE_*``, a ``.env`` file, and ``app.conf.durable``, which wins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from celery_durable.errors import ConfigurationError
from celery_durable.kafka.settings import KafkaSettings

if TYPE_CHECKING:
    from celery import Celery


class Settings(KafkaSettings, BaseSettings):
    """Every setting of a service. Units are last in a name: ``_s`` seconds, ``_ms`` milliseconds."""

    model_config = SettingsConfigDict(
        env_prefix="CELERY_DURABLE_", env_file=".env", extra="ignore", frozen=True, validate_default=True
    )

    client_id: str = Field(
        default="",
        max_length=100,
        pattern=r"^[a-zA-Z0-9._-]*$",
        description="This service's stable name: all processes of one service and database share it, no other service does.",
    )
    database_url: SecretStr = Field(
        default=SecretStr(""),
        description="The service's SQL database, as an SQLAlchemy URL: postgresql+psycopg://… or sqlite:///….",
    )
    database_schema: str | None = Field(
        default=None, description="PostgreSQL schema of the tables; none: the connection's own."
    )
    table_prefix: str = Field(
        default="durable_",
        max_length=20,
        pattern=r"^[a-z_][a-z0-9_]*$",
        description="First part of every table's name.",
    )
    database_pool_size: int = Field(
        default=5,
        ge=1,
        le=100,
        description="SQL connections that a process keeps open at most, besides one held.",
    )

    heartbeat_interval_s: float = Field(
        default=10.0, gt=0, le=3_600, description="How often a running attempt renews its claim to be alive."
    )
    heartbeat_timeout_s: float = Field(
        default=30.0,
        gt=0,
        le=86_400,
        description="An attempt whose heartbeats are this late is lost: it is told to stop, and the operation runs again.",
    )
    max_worker_losses: int = Field(
        default=3,
        ge=0,
        le=1_000,
        description="Lost attempts after which an operation fails; 0: never run again.",
    )
    requeue_after_s: float = Field(
        default=30.0,
        ge=0,
        le=31_536_000,
        description="A retry delay of at least this long gives the permit back and queues again when due.",
    )
    retention_s: float = Field(
        default=604_800.0,
        ge=0,
        le=315_360_000,
        description="How long an ended operation and its result are kept.",
    )
    error_bytes_max: int = Field(
        default=20_000, ge=1_000, le=10_000_000, description="Longest error text and traceback kept, each."
    )

    pass_accounts_max: int = Field(
        default=100, ge=1, le=10_000, description="Accounts brought up to date in one transaction."
    )
    pass_admit_max: int = Field(
        default=500, ge=1, le=100_000, description="Operations admitted for one account in one pass."
    )
    deliver_batch_max: int = Field(default=200, ge=1, le=10_000, description="Operations sent to Celery in one batch.")
    sent_not_started_max: int = Field(
        default=1_000,
        ge=1,
        le=1_000_000,
        description="Operations sent to one Celery queue and not yet started, at most; the rest wait in SQL.",
    )
    resend_min_s: float = Field(
        default=5.0,
        gt=0,
        le=3_600,
        description="A sent operation that did not start is sent again after this long, growing.",
    )
    resend_max_s: float = Field(
        default=300.0, gt=0, le=86_400, description="Longest time between two sends of one attempt."
    )
    sends_max: int = Field(
        default=10,
        ge=2,
        le=1_000,
        description="After so many sends without a start the permit goes back and the operation waits, with a warning.",
    )
    publish_deadline_s: float = Field(
        default=10.0,
        gt=0,
        le=300,
        description="Longest time for one batch to reach the Celery broker; a hung broker stalls no pass.",
    )
    relay_batch_max: int = Field(default=500, ge=1, le=10_000, description="Outbox rows sent to Kafka in one batch.")
    recovery_batch_max: int = Field(
        default=200, ge=1, le=10_000, description="Overdue, expired or ended rows handled in one transaction."
    )
    poll_min_ms: int = Field(
        default=5, ge=1, le=60_000, description="Shortest pause of a dispatcher's loop, while there is work."
    )
    poll_max_ms: int = Field(
        default=250, ge=1, le=600_000, description="Longest pause of a dispatcher's loop, when idle."
    )
    idle_return_s: float = Field(
        default=20.0, gt=0, le=86_400, description="A lease unused this long goes back to the holder."
    )
    shutdown_s: float = Field(
        default=5.0, gt=0, le=600, description="How long a dispatcher may take to end after SIGTERM."
    )


def load(app: Celery | None = None, **overrides: Any) -> Settings:
    """The settings of the app: ``app.conf.durable`` over the environment over ``.env`` over the defaults.

    :raises ConfigurationError: a value is out of bounds, unknown or missing; the message names field, value and remedy.
    """
    raise NotImplementedError


def describe(error: ValidationError, prefix: str) -> ConfigurationError:
    """A pydantic error as one line that names field, value and remedy, and never shows a secret."""
    raise NotImplementedError
