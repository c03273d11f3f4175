"""compose.yaml's own commands, health checks and settings, run as processes on the real stack: no container needed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness import REPOSITORY, Process, Stack, wait_until
from tests.services.process import free_port

FOLDER = REPOSITORY / "compose"
HEALTHY_S = 90

pytestmark = [pytest.mark.processes, pytest.mark.postgresql, pytest.mark.kafka, pytest.mark.redis]


class Composed:
    """The services of compose.yaml that run our code, with the addresses of this test's stack."""

    def __init__(self, stack: Stack, folder: Path) -> None:
        self._services: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
        self._stack = stack
        self._folder = folder
        self._flower_port = str(free_port())
        self._addresses = {
            "CELERY_BROKER_URL": stack.new_broker("shop")["broker_url"],
            "CELERY_DURABLE_DATABASE_URL": stack.new_database("shop"),
            "CELERY_DURABLE_KAFKA_BOOTSTRAP_SERVERS": stack.kafka.bootstrap_servers,
            "HOLDER_DATABASE_URL": stack.new_database("holder"),
            "HOLDER_KAFKA_BOOTSTRAP_SERVERS": stack.kafka.bootstrap_servers,
        }
        # The Kafka is shared with other tests.
        self._apart = {
            "CELERY_DURABLE_TOPIC_PREFIX": stack.kafka.topic_prefix,
            "HOLDER_TOPIC_PREFIX": stack.kafka.topic_prefix,
            "HOLDER_GROUP_ID": f"{stack.kafka.topic_prefix}-holder",
        }

    def env(self, name: str) -> dict[str, str]:
        """The service's environment."""
        own: Mapping[str, str] = self._services[name]["environment"]
        return {key: self._addresses.get(key, value) for key, value in own.items()} | self._apart

    def command(self, words: list[str]) -> list[str]:
        """The words with the programs of this test's environment."""
        path = Path(sys.executable).with_name(words[0])
        return [str(path), *(word.replace("5555", self._flower_port) for word in words[1:])]

    def once(self, name: str) -> None:
        """Runs a service that ends by itself."""
        done = self.run(name, self._services[name]["command"])
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"

    def start(self, name: str) -> Process:
        """Starts a service that goes on."""
        command = self.command(self._services[name]["command"])
        process = Process(name, command, folder=self._folder, env=self.env(name), cwd=FOLDER)
        return self._stack.started(process)

    def run(self, name: str, words: list[str]) -> subprocess.CompletedProcess[str]:
        """Runs a command inside a service."""
        process = Process(f"{name}-command", self.command(words), folder=self._folder, env=self.env(name), cwd=FOLDER)
        process.log.unlink(missing_ok=True)
        code = process.start().wait(60)
        return subprocess.CompletedProcess(words, code, stdout=process.log_tail(), stderr="")

    def wait_healthy(self, name: str) -> None:
        """Runs the service's health check until it passes."""
        words = self._services[name]["healthcheck"]["test"][1:]
        wait_until(lambda: self.run(name, words).returncode == 0, HEALTHY_S, what=f"health of {name}")


def test_every_command_and_health_check_works(real_stack: Stack, tmp_path: Path) -> None:
    composed = Composed(real_stack, tmp_path)
    for name in ("migrate", "topics", "holder-migrate"):
        composed.once(name)
    processes = {name: composed.start(name) for name in ("holder", "dispatcher", "worker", "flower")}
    for name in processes:
        composed.wait_healthy(name)
    script = "import shop; print(shop.charge.delay('acme', 12).get(timeout=60))"
    done = composed.run("worker", ["python", "-c", script])
    assert done.stdout == "acme paid 12", done.stdout
    for name in ("worker", "dispatcher", "holder"):
        assert processes[name].terminate() == 0, processes[name].labelled()
