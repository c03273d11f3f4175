"""Real services for tests and benchmarks, started on a bare machine: each with ports and folders of its own.

Each class is a context manager that works without pytest::

    with PostgreSQL() as server, server.new_database() as url:
        ...

:mod:`tests.services.shared` lets the processes of one test run share a server.
"""

from tests.services.kafka import KafkaBroker, start_kafka
from tests.services.postgresql import PostgreSQL
from tests.services.process import ServerProcess, ServiceUnavailable
from tests.services.rabbitmq import RabbitMQ
from tests.services.redis import Redis

__all__ = ["KafkaBroker", "PostgreSQL", "RabbitMQ", "Redis", "ServerProcess", "ServiceUnavailable", "start_kafka"]
