"""What the services have in common: they are started, killed, started again on their data, and removed."""

from __future__ import annotations

import shutil
import signal
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Self

from tests.services.process import ServerProcess, ServiceUnavailable


class Server(ABC):
    """A service that a test uses. As a context manager it is started, and stopped at the end."""

    @abstractmethod
    def start(self) -> Self:
        """Starts the service and waits until it answers."""

    @abstractmethod
    def stop(self) -> None:
        """Ends the service and removes its data."""

    def kill(self) -> None:
        """Ends every process of the service with SIGKILL; its data stay."""
        raise ServiceUnavailable(f"{type(self).__name__} cannot be killed by a test")

    def restart(self) -> None:
        """Kills the service and starts it again on its data, at the same address."""
        self.kill()
        self.start()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_: object) -> None:
        self.stop()


class LocalServer(Server):
    """A server process of this machine, with its data in a folder of its own."""

    START_S: ClassVar[float] = 30
    STOP: ClassVar[tuple[signal.Signals, float]] = (signal.SIGTERM, 10)
    """The signal that ends it in order, and how long that may take, in seconds."""

    _folder: Path
    _process: ServerProcess

    @abstractmethod
    def answers(self) -> bool:
        """Whether it can be used now."""

    def start(self) -> Self:
        self._process.start()
        self._process.until(self.answers, self.START_S)
        return self

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> None:
        self._process.stop(*self.STOP)
        shutil.rmtree(self._folder, ignore_errors=True)
