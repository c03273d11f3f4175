"""Kafka: the first that works of a given one, a container, Apache Kafka on the machine's Java, and the mock cluster."""

from __future__ import annotations

import base64
import fcntl
import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self

from tests.services.process import NotReady, ServerProcess, ServiceUnavailable, free_port, poll_until
from tests.services.server import LocalServer, Server

logger = logging.getLogger(__name__)

Kind = Literal["external", "container", "apache", "mock"]

ADDRESS_VARIABLE = "CELERY_DURABLE_TEST_KAFKA"
"""Environment variable with the bootstrap address of a Kafka to use instead of starting one."""

_REPOSITORY = Path(__file__).resolve().parents[2]
_POM = _REPOSITORY / "tests" / "kafka" / "pom.xml"
_VERSION = re.search(r"<version>([\d.]+\.[\d.]+)</version>", _POM.read_text())
VERSION = _VERSION.group(1) if _VERSION else ""

_SETTINGS = {
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.session.timeout.ms": "6000",
    "group.consumer.min.heartbeat.interval.ms": "300",
    "group.consumer.heartbeat.interval.ms": "500",
    "auto.create.topics.enable": "false",
    # A broker that was killed registers again only when the session of its former life is over.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
}


class KafkaBroker(Server):
    """A broker, whatever it is behind :attr:`bootstrap_servers`."""

    kind: Kind
    bootstrap_servers: str

    @property
    def real(self) -> bool:
        """True for an Apache Kafka, False for the mock cluster."""
        return self.kind != "mock"

    def answers(self) -> bool:
        """True if the broker answers a metadata request within 2 s."""
        return _answers(self.bootstrap_servers)


class ExternalKafka(KafkaBroker):
    """A Kafka that somebody else runs."""

    kind = "external"

    def __init__(self, bootstrap_servers: str) -> None:
        self.bootstrap_servers = bootstrap_servers

    def start(self) -> Self:
        if not self.answers():
            raise ServiceUnavailable(f"{ADDRESS_VARIABLE} = {self.bootstrap_servers}: no Kafka answers there")
        return self

    def stop(self) -> None:
        pass


class ApacheKafka(KafkaBroker, LocalServer):
    """Apache Kafka in KRaft mode, from its Maven artifacts, as one process on this machine's Java.

    :raises ServiceUnavailable: Java is missing, or the artifacts are neither cached nor to be had.
    """

    kind = "apache"
    START_S = 90
    STOP = (signal.SIGKILL, 10)
    """Its own shutdown takes seconds and saves nothing that anybody will read."""

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        """:param settings: the broker's properties, its folder aside; one that listens on free ports by default."""
        java = shutil.which("java")
        if java is None:
            raise ServiceUnavailable("Apache Kafka: no java on PATH; apt-get install default-jre-headless maven")
        # A test's broker lives for minutes: what the second compiler costs at each start it never gives back.
        flags = ["-Xmx512m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Dlog4j2.disable.jmx=true"]
        self._java = [java, *flags, "-cp", f"{_artifacts()}/*"]
        self._settings = settings or _own_settings(free_port(), free_port())
        self.bootstrap_servers = self._settings["advertised.listeners"].split(",")[0].removeprefix("PLAINTEXT://")
        self._folder = Path(tempfile.mkdtemp(prefix="celery-durable-kafka-"))
        self._properties = self._folder / "server.properties"
        lines = {**self._settings, "log.dirs": str(self._folder / "log")}
        self._properties.write_text("".join(f"{name}={value}\n" for name, value in lines.items()))
        self._process = ServerProcess(
            [*self._java, "kafka.Kafka", str(self._properties)], log=self._folder / "server.log", cwd=self._folder
        )

    def start(self) -> Self:
        if not (self._folder / "log").exists():
            self._format()
        return super().start()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the broker: SIGSTOP and SIGCONT make it hang and go on."""
        self._process.send_all(number)

    def _format(self) -> None:
        words = ["kafka.tools.StorageTool", "format", "-t", _cluster_id(), "-c", str(self._properties)]
        if "controller.quorum.voters" not in self._settings:
            words.append("--standalone")
        done = subprocess.run([*self._java, *words], capture_output=True, text=True, timeout=120, check=False)
        if done.returncode != 0:
            raise NotReady(f"Kafka could not format its storage:\n{done.stdout}{done.stderr}")


def _own_settings(port: int, controller: int) -> dict[str, str]:
    listeners = f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}"
    return {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.listener.names": "CONTROLLER",
        "listeners": listeners,
        "advertised.listeners": listeners,
        "controller.quorum.bootstrap.servers": f"127.0.0.1:{controller}",
        **_SETTINGS,
    }


class ContainerKafka(KafkaBroker):
    """Apache Kafka's own image, by testcontainers.

    :raises ServiceUnavailable: no Docker engine answers a ping, or it cannot have the image.
    """

    kind = "container"

    def __init__(self) -> None:
        _ping_engine()
        from testcontainers.core.container import DockerContainer

        port = free_port()
        self._container = DockerContainer(f"apache/kafka:{VERSION}").with_bind_ports(9092, port)
        self.bootstrap_servers = f"{self._container.get_docker_client().host()}:{port}"
        env = {
            "KAFKA_NODE_ID": "1",
            "KAFKA_PROCESS_ROLES": "broker,controller",
            "KAFKA_CONTROLLER_LISTENER_NAMES": "CONTROLLER",
            "KAFKA_LISTENERS": "PLAINTEXT://:9092,CONTROLLER://:9093",
            "KAFKA_ADVERTISED_LISTENERS": f"PLAINTEXT://{self.bootstrap_servers}",
            "KAFKA_LISTENER_SECURITY_PROTOCOL_MAP": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            "KAFKA_CONTROLLER_QUORUM_VOTERS": "1@localhost:9093",
            **{f"KAFKA_{name.replace('.', '_').upper()}": value for name, value in _SETTINGS.items()},
        }
        self._container.with_envs(**env)
        self._started = False

    def start(self) -> Self:
        if self._started:
            self._container.get_wrapped_container().start()
        else:
            self._start_first()
        poll_until(self._ready, 120, what="Kafka's container")
        return self

    def _start_first(self) -> None:
        import docker

        self._started = True
        try:
            self._container.start()
        except docker.errors.NotFound as error:
            raise ServiceUnavailable(f"Kafka's container: {error.explanation}") from None

    def _ready(self) -> bool:
        if self.answers():
            return True
        self._container.reload()
        if self._container.status != "running":
            output = b"".join(self._container.get_logs()).decode(errors="replace")
            raise NotReady(f"Kafka's container is {self._container.status}; its log ends:\n{output[-4_000:]}")
        return False

    def kill(self) -> None:
        self._container.get_wrapped_container().kill()

    def stop(self) -> None:
        if self._started:
            self._container.stop()


class MockKafka(KafkaBroker):
    """librdkafka's mock cluster inside this process; it ends with it, and keeps nothing on disk."""

    kind = "mock"

    def __init__(self) -> None:
        self.bootstrap_servers = ""
        self._cluster: Any = None

    def start(self) -> Self:
        from confluent_kafka import Producer

        self._cluster = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "unused", "log_level": 3})
        brokers = self._cluster.list_topics(timeout=10).brokers.values()
        self.bootstrap_servers = ",".join(f"{broker.host}:{broker.port}" for broker in brokers)
        return self

    def stop(self) -> None:
        self._cluster = None


def start_kafka(*, mock: bool = True, external: bool = True) -> KafkaBroker:
    """Starts the first Kafka that works here; the caller stops it.

    :param mock: the mock cluster will do.
    :param external: the Kafka of :data:`ADDRESS_VARIABLE` will do; False for a test that kills it.
    :raises ServiceUnavailable: none works; the message says why each does not.
    """
    address = os.environ.get(ADDRESS_VARIABLE)
    if address and external:
        return ExternalKafka(address).start()
    reasons = []
    for kind in (ContainerKafka, ApacheKafka):
        try:
            return kind().__enter__()
        except ServiceUnavailable as error:
            reasons.append(str(error))
    if mock:
        logger.warning("No Apache Kafka here, using the mock cluster: %s", "; ".join(reasons))
        return MockKafka().start()
    raise ServiceUnavailable("; ".join(reasons))


def _answers(bootstrap_servers: str) -> bool:
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    client = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0, "socket.timeout.ms": 2_000})
    try:
        return bool(client.list_topics(timeout=2).brokers)
    except KafkaException:
        return False


def _ping_engine() -> None:
    if "DOCKER_HOST" not in os.environ and not Path("/var/run/docker.sock").exists():
        raise ServiceUnavailable("Kafka's container: no Docker engine (no DOCKER_HOST, no socket)")
    import docker
    import requests

    try:
        client = docker.from_env(timeout=3)
        try:
            client.ping()
        finally:
            client.close()
    except (docker.errors.DockerException, requests.RequestException, OSError) as error:
        raise ServiceUnavailable(f"Kafka's container: no Docker engine answers ({type(error).__name__})") from None


def _cluster_id() -> str:
    """A random UUID as Kafka writes it; one in 64 begins with a dash, which its command line reads as an option."""
    first = b"\0" + uuid.uuid4().bytes[1:]
    return base64.urlsafe_b64encode(first).rstrip(b"=").decode()


def _artifacts() -> Path:
    """The folder with Kafka's jars, filled by Maven on first use."""
    folder = _REPOSITORY / ".cache" / "kafka" / VERSION
    with _exclusive(folder.parent):
        if folder.exists():
            return folder
        maven = shutil.which("mvn")
        if maven is None:
            raise ServiceUnavailable("Apache Kafka: no mvn on PATH to fetch it; apt-get install maven")
        partial = Path(tempfile.mkdtemp(prefix="partial-", dir=folder.parent))
        command = [maven, "-q", "-B", "-f", str(_POM), "dependency:copy-dependencies"]
        command += ["-DincludeScope=runtime", f"-DoutputDirectory={partial}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode != 0 or not any(partial.glob("*.jar")):
            shutil.rmtree(partial)
            raise ServiceUnavailable(f"Apache Kafka: Maven could not fetch it:\n{(done.stdout + done.stderr)[-2_000:]}")
        partial.rename(folder)
        return folder


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
