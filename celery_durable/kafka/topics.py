"""The topics as operators see them: read from ``topics/*.yaml``, created or checked through Kafka's admin API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from celery_durable.kafka.settings import KafkaSettings


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """One topic as it should be."""

    name: str
    partitions: int
    config: dict[str, str]
    why: str


@dataclass(frozen=True, slots=True)
class TopicResult:
    """One topic as it was found, and what was done."""

    name: str
    state: Literal["created", "ok", "differs", "missing"]
    differences: Sequence[str] = ()
    """One line each: what is there, what should be, and what to do. Nothing that exists is changed."""


def client_topics(settings: KafkaSettings, client_id: str) -> list[TopicPlan]:
    """The topics that a service needs: the common ones and its own replies topic."""
    raise NotImplementedError


def holder_topics(
    settings: KafkaSettings, clients: Sequence[str] = (), *, replies_partitions: int = 4
) -> list[TopicPlan]:
    """The topics that a holder needs: the common ones, and the replies topics of ``clients``."""
    raise NotImplementedError


def apply(settings: KafkaSettings, plans: Sequence[TopicPlan], *, create: bool = True) -> list[TopicResult]:
    """Creates the topics that are missing (if ``create``) and compares those that are there.

    :raises ConfigurationError: Kafka is not configured, does not answer, or is the embedded broker, which has no admin API.
    """
    raise NotImplementedError


def report(results: Sequence[TopicResult]) -> int:
    """Prints the results as a table, or as plain lines into a pipe. Returns the exit code: 1 if something differs."""
    raise NotImplementedError
