"""Settings of a service: environment ``CELERY_DURABLE_*``, a ``.env`` file, and ``app.conf.durable``, which wins."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from celery_durable import configuration
from celery_durable.configuration import CHARACTERS, TABLE_PREFIX, TABLE_PREFIX_WORDS, Configuration, refuse_above
from celery_durable.errors import ConfigurationError
from celery_durable.kafka.settings import (
    CLIENT_ID_CHARACTERS_MAX,
    NAME_CHARACTERS,
    NAME_CHARACTERS_WORDS,
    KafkaSettings,
)
from celery_durable.names import nearest

if TYPE_CHECKING:
    from celery import Celery

ENV_PREFIX = "CELERY_DURABLE_"


class Settings(KafkaSettings, Configuration):
    """Every setting of a service."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX)

    client_id: str = Field(
        default="",
        max_length=CLIENT_ID_CHARACTERS_MAX,
        pattern=rf"^[{NAME_CHARACTERS}]*$",
        json_schema_extra={CHARACTERS: NAME_CHARACTERS_WORDS},
        description="This service's stable name: shared by all processes of one service and database, and by no other.",
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
        pattern=TABLE_PREFIX,
        json_schema_extra={CHARACTERS: TABLE_PREFIX_WORDS},
        description="First part of every table's name.",
    )
    database_pool_size: int = Field(
        default=5,
        ge=1,
        le=100,
        description="SQL connections kept open for transactions at most, and as many for single statements.",
    )

    heartbeat_interval_s: float = Field(
        default=10.0, gt=0, le=3_600, description="How often a running attempt renews its claim to be alive."
    )
    heartbeat_timeout_s: float = Field(
        default=30.0,
        gt=0,
        le=86_400,
        description="An attempt whose heartbeats are this late is lost: it must stop, and the operation runs again.",
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
        description="What was sent and did not start is sent again after this long, growing, unless its queue moves.",
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
        default=20, ge=1, le=60_000, description="Shortest pause of a dispatcher's loop, while there is work."
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

    @field_validator("database_schema", mode="before")
    @classmethod
    def _empty_schema_is_none(cls, value: Any) -> Any:
        return None if value == "" else value

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        timeout_s = self.heartbeat_timeout_s
        refuse_above(
            "heartbeat_interval_s", self.heartbeat_interval_s, "heartbeat_timeout_s", timeout_s, 0.5, "half of "
        )
        refuse_above("resend_min_s", self.resend_min_s, "resend_max_s", self.resend_max_s)
        refuse_above("poll_min_ms", self.poll_min_ms, "poll_max_ms", self.poll_max_ms)
        return self

    @classmethod
    def remedy(cls, field: str) -> str:
        """As of every settings model; here the app may give it too."""
        return f'{super().remedy(field)} or app.conf.durable["{field}"]'


def load(
    app: Celery | None = None, *, required: Collection[str] = ("client_id", "database_url"), **overrides: Any
) -> Settings:
    """The settings of the app: ``app.conf.durable`` over the environment over ``.env`` over the defaults.

    :param required: text settings that must not be empty.
    :param overrides: win over everything.
    :raises ConfigurationError: a value is out of bounds, unknown or missing; the message names field, value and remedy.
    """
    return configuration.load(Settings, {**_from_app(app), **overrides}, required)


def _from_app(app: Celery | None) -> dict[str, Any]:
    if app is None:
        return {}
    values = app.conf.get("durable")
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigurationError(
            f"app.conf.durable is of type {type(values).__name__}: give a dictionary, for example "
            '{"client_id": "billing", "database_url": "sqlite:///billing.db"}'
        )
    for key in values:
        if key not in Settings.model_fields:
            hint = nearest(str(key).lower().removeprefix(ENV_PREFIX.lower()), Settings.model_fields)
            raise ConfigurationError(f"app.conf.durable[{key!r}]: there is no such setting{hint}")
    return dict(values)
