"""Bad input through real processes and calls: one clear line with field, value and remedy; processes exit 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.harness import REPOSITORY, Process, Stack, wait_until
from tests.services.process import free_port

pytestmark = pytest.mark.processes

MOST_LINES = 4
"""One from each part of a dispatcher that needs Kafka: once a minute, not once a try."""
SHOP = """
import json, os
from celery import Celery
from celery_durable import DurableTask, durable_task, spool
spool.register()
app = Celery("shop", broker=os.environ["BROKER"])
app.conf.durable = json.loads(os.environ["DURABLE"])

@app.task(base=DurableTask, account="tenant:{tenant}", limit=2)
def charge(tenant, amount):
    return amount
"""
DECLARED = {
    'account="tenant:{tenent}"': ("account = 'tenant:{tenent}'", "'tenent' is no argument", "did you mean 'tenant'?"),
    'account=""': ("account = ''", "empty", "give a text"),
    'account="a", limit=-1': ("limit = -1", "give a whole number from 0"),
    'account="a", limit=True': ("limit = True", "give a whole number from 0"),
    'account="a", limit=1.5': ("limit = 1.5", "give a whole number from 0"),
    'account="a", group_limit=-2': ("group_limit = -2", "give a whole number from 0"),
    'account="a", limt=2': ("limt = 2", "there is no such option", "did you mean 'limit'?"),
}


class Shop:
    """A user's folder with an app."""

    def __init__(self, folder: Path, **durable: Any) -> None:
        self.folder = folder
        (folder / "shop.py").write_text(SHOP)
        settings = {"client_id": "shop", "database_url": f"sqlite:///{folder / 'shop.sqlite3'}", **durable}
        given = {key: value for key, value in settings.items() if value is not None}
        self.env = {
            "PYTHONPATH": str(REPOSITORY),
            "BROKER": f"durable-spool:///{folder / 'broker'}",
            "DURABLE": json.dumps(given),
        }

    def run(self, *words: str, timeout_s: float = 90) -> subprocess.CompletedProcess[str]:
        """Runs Python with the words, in the folder."""
        return subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def celery(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs ``celery -A shop WORDS``."""
        return self.run("-W", "ignore", "-m", "celery", "-A", "shop", *words)


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def assert_refused(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """It exited 2, with one line that says it all."""
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if "Error: " in line or "holder-service: " in line]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in lines[0]


def test_a_wrong_declaration_is_refused_where_it_stands(shop: Shop) -> None:
    """Unknown template field, empty account, negative limit, ``limit=True``, unknown option, in ``durable_task``."""
    script = (
        "import sys; from celery_durable import *\ntry:\n    @durable_task({0})\n    def charge(tenant, amount): ...\n"
    )
    script += "except ConfigurationError as error:\n    print(error)"
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda options: shop.run("-c", script.format(options)), DECLARED))
    for done, (options, parts) in zip(runs, DECLARED.items(), strict=True):
        assert done.returncode == 0, f"{options}: {done.stderr}"
        assert done.stdout.count("\n") == 1, f"{options}: {done.stdout}"
        for part in ("charge: ", *parts):
            assert part in done.stdout, options


def test_a_dispatcher_of_a_wrong_declaration_exits_2(shop: Shop) -> None:
    """The same with Celery's own decorator, which makes its tasks late: found at start, in one line."""
    (shop.folder / "shop.py").write_text(SHOP.replace("limit=2", "limit=-1"))
    assert_refused(shop.celery("durable", "dispatcher"), "shop.charge: limit = -1", "give a whole number from 0")


def test_a_wrong_call_is_refused_and_writes_nothing(shop: Shop) -> None:
    """Empty account: refused at the call, and nothing is written."""
    assert shop.celery("durable", "migrate").returncode == 0
    script = """
from shop import charge
from celery_durable import EnqueueError, limits
for act in (
    lambda: charge.delay("", 1),
    lambda: charge.delay(None, 1),
    lambda: charge.apply_async(("a", 1), account=""),
    lambda: charge.apply_async(("a", 1), account=7),
    lambda: charge.apply_async(("a", 1), group=""),
    lambda: charge.apply_async(("a", 1), limit=3),
    lambda: limits.set("a", -1),
    lambda: limits.set("a", True),
    lambda: limits.set("", 1),
):
    try:
        print("accepted", act())
    except EnqueueError as error:
        print(error)
"""
    done = shop.run("-c", script)
    expected = (
        ("tenant = ''", "not empty"),
        ("tenant = None", "not empty"),
        ("account = ''", "at least one character"),
        ("account = 7", "give a text"),
        ("group = ''", "at least one character"),
        ("limit = 3", "declare it on the task"),
        ("limit = -1", "give a whole number from 0"),
        ("limit = True", "give a whole number from 0"),
        ("account = ''", "at least one character"),
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(expected), done.stdout + done.stderr
    for line, parts in zip(lines, expected, strict=True):
        for part in parts:
            assert part in line
    assert shop.celery("durable", "ps").stdout == "No operations.\n"


@pytest.mark.parametrize(
    "command", [("durable", "dispatcher"), ("worker", "--pool", "solo")], ids=lambda words: words[0]
)
def test_without_a_database_or_a_schema_a_process_exits_2(tmp_path: Path, command: tuple[str, ...]) -> None:
    """Missing database, a setting out of bounds, schema missing: dispatcher and worker refuse to start."""
    cases: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"database_url": None}, ("database_url is not set", "Set CELERY_DURABLE_DATABASE_URL")),
        (
            {"database_url": f"postgresql+psycopg://a:secret@127.0.0.1:{free_port()}/b"},
            ("a:***@127.0.0.1", "does not answer"),
        ),
        ({"heartbeat_timeout_s": -1}, ("heartbeat_timeout_s = -1", "Set CELERY_DURABLE_HEARTBEAT_TIMEOUT_S")),
        ({"client_id": None}, ("client_id is not set", "Set CELERY_DURABLE_CLIENT_ID")),
        ({}, ("There are no tables in sqlite:///", "durable migrate")),
    ]

    def run(number: int) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / str(number)
        folder.mkdir()
        return Shop(folder, kafka_bootstrap_servers="127.0.0.1:1", **cases[number][0]).celery(*command)

    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(run, range(len(cases))))
    for done, (_, parts) in zip(runs, cases, strict=True):
        assert_refused(done, *parts)
        assert "secret" not in done.stderr


def test_a_holder_without_what_it_needs_exits_2(tmp_path: Path) -> None:
    """The same for the holder: missing database, schema missing, no Kafka, a wrong limit."""
    url = {"HOLDER_DATABASE_URL": f"sqlite:///{tmp_path / 'holder.sqlite3'}"}
    kafka = {"HOLDER_KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1"}
    cases: list[tuple[dict[str, str], tuple[str, ...]]] = [
        (kafka, ("database_url is not set", "Set HOLDER_DATABASE_URL")),
        (url, ("kafka_bootstrap_servers is not set", "Set HOLDER_KAFKA_BOOTSTRAP_SERVERS")),
        ({**url, **kafka}, ("There are no tables in sqlite:///", "holder-service migrate")),
        ({**url, **kafka, "HOLDER_LIMITS": '{"a": -1}'}, ("limits.a = -1", "Set HOLDER_LIMITS")),
        ({**url, **kafka, "HOLDER_LIMITS": '{"a": true}'}, ("limits.a = True", "Set HOLDER_LIMITS")),
    ]

    def run(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "holder_service.cli", "run"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **env},
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(run, [env for env, _ in cases]))
    for done, (_, parts) in zip(runs, cases, strict=True):
        assert_refused(done, *parts)


def test_kafka_absent(shop: Shop, embedded_stack: Stack) -> None:
    """No Kafka given: the dispatcher exits 2. One that does not answer: it says so in one line, and loses nothing."""
    assert shop.celery("durable", "migrate").returncode == 0
    assert_refused(shop.celery("durable", "dispatcher"), "kafka_bootstrap_servers is empty", "host:port")
    address = f"127.0.0.1:{free_port()}"
    service = embedded_stack.service(kafka_bootstrap_servers=address)
    dispatcher: Process = service.dispatcher()
    service.worker(pool="solo", concurrency=1)
    assert service.task("add").delay(1, 2).get(timeout=60) == 3
    waiting = service.task("work").delay("tenant:acme")
    line = f"kafka_bootstrap_servers = '{address}': Kafka does not answer"
    wait_until(lambda: line in dispatcher.log.read_text(), 30, what="the line")
    assert dispatcher.alive
    assert waiting.state == "PENDING"
    assert dispatcher.terminate() == 0
    told = [line for line in dispatcher.log.read_text().splitlines() if address in line]
    assert len(told) <= MOST_LINES, told
