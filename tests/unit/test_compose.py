"""compose.yaml is valid by the Compose Specification, and every command of ours in it exists."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml

from celery_durable.cli import durable
from celery_durable.settings import Settings
from holder_service.settings import HolderSettings

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "compose"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """The file with its anchors and merges resolved."""
    document: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    return document


def commands(compose: dict[str, Any]) -> list[list[str]]:
    """Every command and health check that runs one of our programs."""
    found = [service["command"] for service in compose["services"].values() if "command" in service]
    found += [
        service["healthcheck"]["test"][1:] for service in compose["services"].values() if "healthcheck" in service
    ]
    return [words for words in found if words[0] in ("celery", "holder-service")]


def exists(group: click.Command, words: list[str]) -> bool:
    """True if click accepts the words, without running anything."""
    with group.make_context("x", list(words), resilient_parsing=False) as context:
        if not isinstance(group, click.Group):
            return True
        _, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
        return command is not None and exists(command, rest)


def test_it_is_valid(compose: dict[str, Any]) -> None:
    schema = json.loads((REPOSITORY / "tests" / "data" / "compose-spec.json").read_text())
    jsonschema.Draft7Validator(schema).validate(compose)


def test_every_service_command_is_one_of_the_cli(compose: dict[str, Any]) -> None:
    ours = [words for words in commands(compose) if words[:4] == ["celery", "-A", "shop", "durable"]]
    assert {words[4] for words in ours} == {"migrate", "topics", "dispatcher", "ps"}
    for words in ours:
        assert exists(durable, words[4:]), words
    assert all(
        words[3] in ("durable", "worker", "flower", "inspect") for words in commands(compose) if words[0] == "celery"
    )


def test_every_holder_command_is_one_of_the_cli(compose: dict[str, Any]) -> None:
    group = importlib.import_module("holder_service.cli").main
    ours = [words for words in commands(compose) if words[0] == "holder-service"]
    assert {words[1] for words in ours} == {"migrate", "run", "accounts"}
    for words in ours:
        assert exists(group, words[1:]), words


def test_every_setting_exists(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for variable in service.get("environment", {}):
            for prefix, model in (("CELERY_DURABLE_", Settings), ("HOLDER_", HolderSettings)):
                if variable.startswith(prefix):
                    assert variable.removeprefix(prefix).lower() in model.model_fields, (name, variable)


def test_every_service_is_there_with_health_checks_and_volumes(compose: dict[str, Any]) -> None:
    services = compose["services"]
    lasting = {"kafka", "postgresql", "redis", "holder", "dispatcher", "worker", "flower"}
    assert lasting <= services.keys()
    assert all("healthcheck" in services[name] for name in lasting)
    used = {mount.partition(":")[0] for service in services.values() for mount in service.get("volumes", [])}
    assert set(compose["volumes"]) <= used
    for service in services.values():
        for other, condition in service.get("depends_on", {}).items():
            assert condition["condition"] in ("service_healthy", "service_completed_successfully")
            assert condition["condition"] != "service_healthy" or "healthcheck" in services[other]


def test_the_image_holds_every_file_that_it_copies() -> None:
    for sources in re.findall(r"^COPY (.+) \S+$", (FOLDER / "Dockerfile").read_text(), flags=re.MULTILINE):
        for source in sources.split():
            assert (REPOSITORY / source).exists(), source
