"""RabbitMQ from the machine's own package, with a node name, ports and folders of its own."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import tempfile
import uuid
from pathlib import Path
from typing import Self

import amqp

from tests.services.process import ServerProcess, ServiceUnavailable, free_port
from tests.services.server import LocalServer

_SCRIPTS = (Path("/usr/lib/rabbitmq/bin"), Path("/usr/local/sbin"), Path("/opt/homebrew/sbin"))


class RabbitMQ(LocalServer):
    """A node with the default user ``guest`` on loopback.

    :raises ServiceUnavailable: RabbitMQ or Erlang is not installed.
    """

    START_S = 90
    STOP = (signal.SIGTERM, 30)

    def __init__(self) -> None:
        # Debian's wrapper on PATH switches to the user rabbitmq and to the system's folders: use the script behind it.
        script = next(
            (folder / "rabbitmq-server" for folder in _SCRIPTS if (folder / "rabbitmq-server").exists()), None
        )
        epmd = shutil.which("epmd")
        if script is None or epmd is None:
            raise ServiceUnavailable("RabbitMQ: no rabbitmq-server or epmd; apt-get install rabbitmq-server")
        self.port = free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="celery-durable-rabbitmq-"))
        epmd_port = free_port()
        node = f"durable-{uuid.uuid4().hex[:8]}@localhost"
        (self._folder / "enabled_plugins").write_text("[].\n")
        (self._folder / "rabbitmq.conf").write_text(
            "loopback_users.guest = true\nvm_memory_high_watermark.absolute = 1GB\n"
        )
        self._env = {
            "HOME": str(self._folder),
            "ERL_EPMD_PORT": str(epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": node,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": str(self._folder / "data"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_CONFIG_FILE": str(self._folder / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self._folder / "enabled_plugins"),
            "RABBITMQ_PID_FILE": str(self._folder / "pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        }
        # Erlang starts this daemon by itself and leaves it behind: ours is a child, so it ends with the node.
        self._names = ServerProcess(
            [epmd, "-port", str(epmd_port), "-address", "127.0.0.1"], log=self._folder / "epmd.log", cwd=self._folder
        )
        self._process = ServerProcess([str(script)], log=self._folder / "server.log", cwd=self._folder, env=self._env)
        self._control = script.with_name("rabbitmqctl")
        self._node = node

    def url(self, vhost: str = "/") -> str:
        """The AMQP URL of a virtual host."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}/{vhost.replace('/', '%2F')}"

    def start(self) -> Self:
        if not self._names.alive:
            self._names.start()
        return super().start()

    def new_vhost(self) -> str:
        """Makes a virtual host and returns its URL."""
        name = f"t-{uuid.uuid4().hex[:12]}"
        self.control("add_vhost", name)
        self.control("set_permissions", "-p", name, "guest", ".*", ".*", ".*")
        return self.url(name)

    def control(self, *words: str) -> str:
        """Runs ``rabbitmqctl`` on the node and returns its output."""
        command = [str(self._control), "-n", self._node, "-q", *words]
        env = {**self._env, "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "LANG": "C.UTF-8"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"rabbitmqctl {' '.join(words)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def stop(self) -> None:
        super().stop()
        self._names.stop()

    def answers(self) -> bool:
        """Whether a connection can be opened."""
        connection = amqp.Connection(f"127.0.0.1:{self.port}", connect_timeout=2)
        try:
            connection.connect()
        except (OSError, amqp.AMQPError):
            return False
        finally:
            with contextlib.suppress(OSError, amqp.AMQPError):
                connection.close()
        return True
