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
    lines = [line for line in done.stderr.splitlines() if "Error: " in line]
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


COMMANDS = {
    "prefork": ("worker", "--pool", "prefork"),
    "threads": ("worker", "--pool", "threads"),
    "solo": ("worker", "--pool", "solo"),
    "beat": ("beat",),
    "dispatcher": ("durable", "dispatcher"),
    "ps": ("durable", "ps"),
}


@pytest.mark.parametrize("options", DECLARED)
def test_a_worker_of_a_wrong_declaration_exits_2(shop: Shop, options: str) -> None:
    """With Celery's own decorator, which makes its tasks late: found when the worker starts, in one line."""
    (shop.folder / "shop.py").write_text(SHOP.replace('account="tenant:{tenant}", limit=2', options))
    assert_refused(shop.celery("worker", "--pool", "solo"), "shop.charge: ", *DECLARED[options])


def test_a_worker_that_spawns_its_pool_exits_2(shop: Shop) -> None:
    """Pools are forked on Linux, spawned elsewhere: found in the main process, before there is a child."""
    (shop.folder / "shop.py").write_text(SHOP.replace("limit=2", "limit=-1"))
    script = "import billiard, sys; billiard.set_start_method('spawn', force=True)\n"
    script += "sys.argv = ['celery', '-A', 'shop', 'worker', '--concurrency', '1']\n"
    script += "from celery.__main__ import main; main()"
    assert_refused(shop.run("-c", script), "shop.charge: limit = -1", "give a whole number from 0")


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_every_command_refuses_a_wrong_declaration_wherever_it_stands(shop: Shop, command: tuple[str, ...]) -> None:
    """In the app's module, late or raised while it is imported; in a module that the app includes or discovers."""
    late = SHOP.replace("tenant, amount", "tenent, amount")
    early = late.replace("app.task(base=DurableTask, ", "durable_task(")
    assert early != late != SHOP
    lazy = SHOP[: SHOP.index("@app.task")]
    package = shop.folder / "pages"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "tasks.py").write_text(
        "from celery_durable import durable_task\n"
        '@durable_task(account="tenant:{tenant}")\ndef charge(tenent, amount): ...\n'
    )
    apps = {
        "late": (late, "shop.charge"),
        "early": (early, "shop.charge"),
        "included": (lazy + 'app.conf.include = ["pages.tasks"]\n', "pages.tasks.charge"),
        "discovered": (lazy + 'app.autodiscover_tasks(["pages"])\n', "pages.tasks.charge"),
    }
    for module, (text, _) in apps.items():
        (shop.folder / f"{module}.py").write_text(text)

    def run(module: str) -> subprocess.CompletedProcess[str]:
        return shop.run("-W", "ignore", "-m", "celery", "-A", module, *command)

    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(run, apps))
    for done, (module, (_, task)) in zip(runs, apps.items(), strict=True):
        name = task.replace("shop", module)
        assert_refused(done, f"{name}: account = 'tenant:{{tenant}}'", "'tenant' is no argument", "'tenent'?")


def test_an_app_that_does_not_load_for_another_reason_is_left_to_celery(shop: Shop) -> None:
    """Whoever looks for a fault of the app's own needs its traceback."""
    (shop.folder / "shop.py").write_text("raise ValueError('a fault of the app')")
    done = shop.celery("inspect", "ping")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert "ValueError: a fault of the app" in done.stderr


def test_a_command_that_asks_the_workers_needs_no_right_declaration(shop: Shop) -> None:
    """``celery inspect`` binds no task; what fails while the app is imported is one line there too."""
    late = SHOP.replace("limit=2", "limit=-1")
    (shop.folder / "shop.py").write_text(late)
    done = shop.celery("inspect", "-t", "0.1", "ping")
    assert "No nodes replied" in done.stderr
    (shop.folder / "shop.py").write_text(late.replace("app.task(base=DurableTask, ", "durable_task("))
    assert_refused(shop.celery("inspect", "-t", "0.1", "ping"), "shop.charge: limit = -1", "from 0")


def test_plain_python_raises_the_error_as_it_is(shop: Shop) -> None:
    """Only Celery's command line ends: a program that imports the module may catch what is wrong with it."""
    (shop.folder / "shop.py").write_text(
        SHOP.replace("limit=2", "limit=-1").replace("app.task(base=DurableTask, ", "durable_task(")
    )
    caught = "from celery_durable import ConfigurationError\ntry:\n    import shop\n"
    caught += "except ConfigurationError as error:\n    print(error)"
    done = shop.run("-c", caught)
    assert done.stdout == "shop.charge: limit = -1: give a whole number from 0 to 1000000000\n", done.stderr
    done = shop.run("shop.py")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("celery_durable.errors.ConfigurationError: __main__.charge: limit")


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


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_without_a_database_or_a_schema_a_process_exits_2(tmp_path: Path, command: tuple[str, ...]) -> None:
    """Missing database, a setting out of bounds, schema missing: every process refuses to start."""
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
