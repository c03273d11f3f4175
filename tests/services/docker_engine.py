"""The few calls of Docker's HTTP API that testcontainers makes for Kafka, with Apache Kafka itself behind them.

It lets a machine without a Docker engine run :class:`~tests.services.kafka.ContainerKafka`: the real testcontainers and
docker-py speak to it, and the broker that they start is the one of the Maven artifacts, set up by the environment of
its container as the image ``apache/kafka`` does it. Free ports stand in for the network of a container.

``python -m tests.services.docker_engine COMMAND`` runs a command, such as pytest, that finds this engine.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, Protocol
from urllib.parse import urlsplit

from tests.services.kafka import VERSION, ApacheKafka
from tests.services.process import NotReady, free_port

KAFKA_IMAGE = f"apache/kafka:{VERSION}"
RYUK_IMAGE = "testcontainers/ryuk:0.8.1"
_PATH = re.compile(r"(?:/v[\d.]+)?/(?P<kind>containers|images)/(?P<name>.+?)(?:/(?P<verb>json|start|kill|logs))?")


class _Program(Protocol):
    """What an image runs."""

    def start(self) -> object: ...

    def kill(self) -> None: ...

    def stop(self) -> None: ...


class _Ryuk:
    """testcontainers' reaper, as far as its clients see it: the end of the engine ends all."""

    def __init__(self, port: int) -> None:
        self._port = port

    def start(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", self._port))

    def stop(self) -> None:
        self._socket.close()

    kill = stop


def image_settings(env: Mapping[str, str], ports: Mapping[int, int]) -> dict[str, str]:
    """The broker's properties that the image makes of its environment: ``KAFKA_NODE_ID`` is ``node.id``.

    :param ports: this machine's port for each that the broker listens on inside its container.
    """
    settings = {name[6:].lower().replace("_", "."): value for name, value in env.items() if name.startswith("KAFKA_")}
    for name in ("listeners", "controller.quorum.voters"):
        for inside, outside in ports.items():
            settings[name] = settings[name].replace(f":{inside}", f":{outside}")
    return settings


class _Container:
    def __init__(self, config: dict[str, Any]) -> None:
        self.id = uuid.uuid4().hex * 2
        self._config = config
        self._status = "created"
        self.log = ""
        bindings = config["HostConfig"]["PortBindings"]
        self._ports = {port: int(bound[0].get("HostPort") or free_port()) for port, bound in bindings.items()}
        self._program = self._load()

    def _load(self) -> _Program:
        if self._config["Image"] == RYUK_IMAGE:
            return _Ryuk(self._ports["8080/tcp"])
        env = dict(line.split("=", 1) for line in self._config["Env"])
        return ApacheKafka(image_settings(env, {9092: self._ports["9092/tcp"], 9093: free_port()}))

    def start(self) -> None:
        try:
            self._program.start()
            self._status = "running"
        except NotReady as error:
            self._status, self.log = "exited", str(error)

    def kill(self) -> None:
        self._program.kill()
        self._status = "exited"

    def remove(self) -> None:
        self._program.stop()

    def inspect(self) -> dict[str, Any]:
        published = {port: [{"HostIp": "127.0.0.1", "HostPort": str(host)}] for port, host in self._ports.items()}
        return {
            "Id": self.id,
            "Config": {**self._config, "Tty": True},
            "State": {"Status": self._status},
            "NetworkSettings": {"Ports": published},
        }


class Engine(HTTPServer):
    """One request at a time, all in the thread that serves: what it starts ends with that thread."""

    def __init__(self, images: frozenset[str]) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.images = images
        self.containers: dict[str, _Container] = {}

    @property
    def host(self) -> str:
        """What ``DOCKER_HOST`` says to find it."""
        return f"tcp://127.0.0.1:{self.server_port}"

    def server_close(self) -> None:
        super().server_close()
        for container in self.containers.values():
            container.remove()


class _Request(BaseHTTPRequestHandler):
    server: Engine

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"null")
        status, answer = self._call(path, body)
        content = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_DELETE = _answer

    def _call(self, path: str, body: Any) -> tuple[int, Any]:
        if path.endswith(("/version", "/_ping")):
            return 200, {"ApiVersion": "1.45"}
        if path.endswith("/images/create"):
            return 404, {"message": "pull access denied"}
        if path.endswith("/containers/create"):
            container = _Container(body)
            self.server.containers[container.id] = container
            return 201, {"Id": container.id, "Warnings": []}
        found = _PATH.fullmatch(path)
        if found is None:
            return 501, {"message": f"no such call here: {self.command} {path}"}
        if found["kind"] == "images":
            known = found["name"] in self.server.images
            return (200, {"Id": found["name"]}) if known else (404, {"message": f"no such image: {found['name']}"})
        return self._call_container(self.server.containers, found["name"], found["verb"])

    def _call_container(self, containers: dict[str, _Container], name: str, verb: str | None) -> tuple[int, Any]:
        if name not in containers:
            return 404, {"message": f"no such container: {name}"}
        if verb == "json":
            return 200, containers[name].inspect()
        if verb == "logs":
            return 200, containers[name].log
        if self.command == "DELETE":
            containers.pop(name).remove()
        elif verb == "start":
            containers[name].start()
        elif verb == "kill":
            containers[name].kill()
        return 204, ""

    def log_message(self, *_: object) -> None:
        """Says nothing: a test's output is no server log."""


@contextmanager
def docker_engine(images: frozenset[str] = frozenset({KAFKA_IMAGE, RYUK_IMAGE})) -> Iterator[Engine]:
    """An engine that has these images, and cannot pull another."""
    engine = Engine(images)
    thread = threading.Thread(target=engine.serve_forever, kwargs={"poll_interval": 0.05}, name="docker-engine")
    thread.start()
    try:
        yield engine
    finally:
        engine.shutdown()
        engine.server_close()
        thread.join()


def _main(command: list[str]) -> int:
    with docker_engine() as engine:
        env = os.environ | {"DOCKER_HOST": engine.host, "TESTCONTAINERS_CONNECTION_MODE": "docker_host"}
        return subprocess.run(command, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
