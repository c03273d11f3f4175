"""The topics as operators see them: read from ``topics/*.yaml``, created or checked through Kafka's admin API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal

import yaml
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic  # type: ignore[attr-defined]
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.table import Table

from celery_durable.errors import ConfigurationError
from celery_durable.kafka import client
from celery_durable.kafka.settings import KafkaSettings

CREATE_S = 30.0
"""How long Kafka may take to create topics, in seconds."""

State = Literal["created", "ok", "differs", "missing", "unused"]


class TopicSpec(BaseModel):
    """One file of ``topics/``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    per_client: bool = False
    optional: bool = False
    key: str
    messages: tuple[str, ...]
    writers: str
    readers: str
    partitions: int = Field(ge=1)
    config: Mapping[str, str]
    why: str


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """One topic as it should be."""

    name: str
    partitions: int
    """At least so many: the count may be raised at any time (rule 7)."""
    config: Mapping[str, str]
    """``retention.ms`` is a minimum; everything else is to be as it is here."""
    why: str
    optional: bool = False
    """Not created; compared where it exists."""


@dataclass(frozen=True, slots=True)
class TopicResult:
    """One topic as it was found, and what was done."""

    name: str
    state: State
    differences: Sequence[str] = ()
    """One line each: what is there, what should be, and what to do. Nothing that exists is changed."""


@cache
def specs() -> Mapping[str, TopicSpec]:
    """Every topic by the suffix of its name, from the wheel or the repository."""
    found = [
        TopicSpec.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
        for file in sorted(folder().iterdir(), key=lambda file: file.name)
        if file.name.endswith(".yaml") and file.name != "asyncapi.yaml"
    ]
    return {spec.name: spec for spec in found}


def folder() -> Traversable:
    """Where the topics' files are: the wheel carries them as ``celery_durable/_topics``."""
    installed = files("celery_durable") / "_topics"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "topics"


def client_topics(settings: KafkaSettings, client_id: str) -> list[TopicPlan]:
    """The topics that a service needs: the common ones and its own replies topic."""
    return [
        _plan("accounts", settings.accounts_topic),
        _plan("replies", settings.replies_topic(client_id)),
        _plan("dead-letters", settings.dead_letters_topic),
        _plan("events", settings.events_topic),
    ]


def holder_topics(
    settings: KafkaSettings, clients: Sequence[str] = (), *, replies_partitions: int | None = None
) -> list[TopicPlan]:
    """The topics that a holder needs: the common ones, and the replies topics of ``clients``."""
    return [
        _plan("accounts", settings.accounts_topic),
        _plan("limits", settings.limits_topic),
        _plan("dead-letters", settings.dead_letters_topic),
        *(_plan("replies", settings.replies_topic(one), partitions=replies_partitions) for one in clients),
    ]


def apply(settings: KafkaSettings, plans: Sequence[TopicPlan], *, create: bool = True) -> list[TopicResult]:
    """Creates the topics that are missing (if ``create``) and compares those that are there.

    :raises ConfigurationError: Kafka is not configured, does not answer, or is the embedded broker, which has no admin
        API.
    """
    admin = client.make_admin(settings)
    try:
        return _apply(admin, plans, create=create)
    except KafkaException as error:
        raise ConfigurationError(
            f"kafka_bootstrap_servers = {settings.kafka_bootstrap_servers!r}: Kafka does not answer "
            f"({error.args[0].str()}); check the address, and kafka_options for its security settings"
        ) from None


def report(results: Sequence[TopicResult]) -> int:
    """Prints the results as a table, or as plain lines into a pipe. Returns the exit code: 1 if something differs."""
    console = Console()
    if console.is_terminal:
        table = Table("topic", "state", "differences")
        for result in results:
            table.add_row(result.name, _state(result), "\n".join(result.differences))
        console.print(table)
    else:
        for result in results:
            for line in (f"{result.name}: {_state(result)}", *(f"  {one}" for one in result.differences)):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
    return int(any(result.state in ("differs", "missing") for result in results))


def _state(result: TopicResult) -> str:
    if result.state == "unused":
        return "unused: it is optional, so it is not created; make it yourself to use it"
    return result.state


def _plan(suffix: str, name: str, *, partitions: int | None = None) -> TopicPlan:
    spec = specs()[suffix]
    return TopicPlan(name, partitions or spec.partitions, spec.config, spec.why, spec.optional)


def _apply(admin: AdminClient, plans: Sequence[TopicPlan], *, create: bool) -> list[TopicResult]:
    cluster = admin.list_topics(timeout=client.ANSWER_S)
    if client.is_embedded(cluster.cluster_id):
        raise ConfigurationError(
            "kafka_bootstrap_servers: this is the embedded broker, which has no admin API: it makes topics on first "
            "use, with 4 partitions each, so there is nothing to apply"
        )
    counts = {name: len(found.partitions) for name, found in cluster.topics.items()}
    missing = [plan for plan in plans if plan.name not in counts and not plan.optional]
    done = _create(admin, missing) if create else {plan.name: TopicResult(plan.name, "missing") for plan in missing}
    done |= {plan.name: TopicResult(plan.name, "unused") for plan in plans if plan.optional and plan.name not in counts}
    configs = _configs(admin, [plan.name for plan in plans if plan.name in counts])
    for plan in plans:
        if plan.name in counts:
            differences = compare(plan, counts[plan.name], configs[plan.name])
            done[plan.name] = TopicResult(plan.name, "differs" if differences else "ok", differences)
    return [done[plan.name] for plan in plans]


def _create(admin: AdminClient, plans: Sequence[TopicPlan]) -> dict[str, TopicResult]:
    if not plans:
        return {}
    # Replication follows the broker's default.replication.factor: only its operator knows how many brokers there are.
    topics = [NewTopic(plan.name, plan.partitions, -1, config=dict(plan.config)) for plan in plans]
    results = {}
    for name, future in admin.create_topics(topics, operation_timeout=CREATE_S, request_timeout=CREATE_S).items():
        try:
            future.result(CREATE_S + 1)
            results[name] = TopicResult(name, "created")
        except KafkaException as error:
            if error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS:
                # Another `topics apply` was faster; the next one compares.
                results[name] = TopicResult(name, "ok")
            else:
                results[name] = TopicResult(name, "missing", [f"it could not be created: {error.args[0].str()}"])
    return results


def _configs(admin: AdminClient, names: Iterable[str]) -> dict[str, dict[str, str]]:
    resources = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in names]
    if not resources:
        return {}
    found = admin.describe_configs(resources, request_timeout=client.ANSWER_S)
    return {
        resource.name: {name: str(entry.value) for name, entry in future.result(client.ANSWER_S + 1).items()}
        for resource, future in found.items()
    }


def compare(plan: TopicPlan, partitions: int, config: Mapping[str, str]) -> list[str]:
    """What differs between the plan and a topic that exists, one line each, with the remedy."""
    differences = []
    if partitions < plan.partitions:
        differences.append(
            f"partitions: {partitions}, should be at least {plan.partitions}; raise it with "
            f"`kafka-topics.sh --alter --topic {plan.name} --partitions {plan.partitions}`, which is safe at any time"
        )
    for name, wanted in plan.config.items():
        actual = config.get(name)
        if not _satisfies(name, actual, wanted):
            differences.append(
                f"{name}: {actual}, should be {'at least ' if name == 'retention.ms' else ''}{wanted}; set it with "
                f"`kafka-configs.sh --alter --topic {plan.name} --add-config {name}={wanted}`"
            )
    return differences


def _satisfies(name: str, actual: str | None, wanted: str) -> bool:
    if actual is None:
        return False
    if name == "retention.ms":
        return int(actual) < 0 or int(actual) >= int(wanted)
    return sorted(actual.split(",")) == sorted(wanted.split(","))
