"""``celery -A app durable …`` as an operator runs it: exit codes, one clear line for what is wrong, JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from celery_durable.store.database import Database
from celery_durable.store.migrations import REVISIONS
from celery_durable.store.schema import build_tables
from tests.harness import REPOSITORY

APP = """
from celery import Celery
app = Celery("shop", broker="memory://")
app.conf.durable = {"client_id": "shop", "database_url": "sqlite:///shop.sqlite3"}
"""


def celery(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs ``celery WORDS`` in a user's own folder."""
    return subprocess.run(
        [sys.executable, "-m", "celery", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def durable(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs ``celery -A shop durable WORDS``."""
    return celery(folder, "-A", "shop", "durable", *words, **env)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A folder with a user's app."""
    (tmp_path / "shop.py").write_text(APP)
    return tmp_path


def assert_one_line(done: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    """The command ended with the code and one line on stderr that holds the parts."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    for part in parts:
        assert part in done.stderr


def test_every_command_has_help(shop: Path) -> None:
    top = durable(shop, "--help")
    assert top.returncode == 0, top.stderr
    for command in ("dispatcher", "migrate", "topics", "up", "ps", "why", "accounts"):
        assert f"  {command} " in top.stdout


def test_migrate_then_look(shop: Path) -> None:
    assert_one_line(durable(shop, "ps"), 2, "There are no tables in sqlite:///shop.sqlite3", "durable migrate")
    at = "The tables durable_… are at revision {}.\n"
    assert durable(shop, "migrate", "--to", "0001").stdout == at.format("0001")
    for to in ((), ("--to", REVISIONS[-1])):
        done = durable(shop, "migrate", *to)
        assert (done.returncode, done.stdout, done.stderr) == (0, at.format(REVISIONS[-1]), "")
    assert_one_line(durable(shop, "migrate", "--to", "7"), 2, "--to 7", "use head or one of 0001")
    assert durable(shop, "ps").stdout == "No operations.\n"
    assert json.loads(durable(shop, "ps", "--json").stdout) == []
    assert durable(shop, "accounts").stdout == "No account is in use.\n"


def test_ps_why_and_accounts_show_a_waiting_operation(shop: Path) -> None:
    """Case G1: why an operation waits."""
    assert durable(shop, "migrate").returncode == 0
    database = Database(f"sqlite:///{shop / 'shop.sqlite3'}")
    tables = build_tables()
    values = {"task": "shop.charge", "queue": "celery", "account": "tenant:acme", "enqueued_at": 1}
    with database.transaction() as connection:
        connection.execute(tables.operations.insert(), [{"id": "op-1", "state": "running", **values}])
        connection.execute(tables.operations.insert(), [{"id": "op-2", "state": "queued", **values}])
    database.dispose()
    listed = durable(shop, "ps")
    assert "op-1" in listed.stdout, listed.stderr
    assert "tenant:acme" in listed.stdout
    assert [each["id"] for each in json.loads(durable(shop, "ps", "--json", "--state", "queued").stdout)] == ["op-2"]
    why = durable(shop, "why", "op-2")
    assert "Before it in the queue: 0" in why.stdout, why.stderr
    assert "op-1" in why.stdout
    assert json.loads(durable(shop, "why", "op-2", "--json").stdout)["in_use"] == 1
    (account,) = json.loads(durable(shop, "accounts", "--json").stdout)
    assert (account["account"], account["in_use"], account["waiting"]) == ("tenant:acme", 1, 1)
    assert "tenant:acme" in durable(shop, "accounts").stdout


def test_what_is_not_there_is_one_line(shop: Path) -> None:
    durable(shop, "migrate")
    assert_one_line(durable(shop, "why", "nothing"), 1, "'nothing'")
    for words, says in (
        (("--state", "asleep"), "'--state': 'asleep': there is no such state; use scheduled, queued"),
        (("--limit", str(10**30)), "'--limit'"),
    ):
        wrong = durable(shop, "ps", *words)
        assert (wrong.returncode, wrong.stdout) == (2, "")
        assert says in " ".join(wrong.stderr.split())


@pytest.mark.parametrize(
    ("durable_settings", "parts"),
    [
        ('{"database_url": "sqlite:///x"}', ["client_id", "CELERY_DURABLE_CLIENT_ID"]),
        ('{"client_id": "shop"}', ["database_url", "CELERY_DURABLE_DATABASE_URL"]),
        ('{"client_id": "shop", "database_url": "mysql://a:secret@b/c"}', ["database_url = mysql://a:***@b/c"]),
        ('{"client_id": "shop", "database_url": "postgresql://a:secret@127.0.0.1:1/c"}', ["does not answer", "a:***@"]),
        ('{"client_id": "shop", "databse_url": "x"}', ["databse_url", "database_url"]),
        (
            '{"client_id": "shop", "database_url": "sqlite:///x", "heartbeat_interval_s": -1}',
            ["heartbeat_interval_s = -1"],
        ),
    ],
)
def test_wrong_settings_are_one_line_and_exit_2(shop: Path, durable_settings: str, parts: list[str]) -> None:
    """Case G5: no password in a message."""
    (shop / "shop.py").write_text(
        f"from celery import Celery\napp = Celery('shop')\napp.conf.durable = {durable_settings}"
    )
    done = durable(shop, "migrate")
    assert_one_line(done, 2, *parts)
    assert "secret" not in done.stderr


def test_a_dispatcher_without_tables_or_app_exits_2(shop: Path) -> None:
    assert_one_line(durable(shop, "dispatcher", CELERY_DURABLE_POLL_MAX_MS="0"), 2, "poll_max_ms")
    assert_one_line(durable(shop, "dispatcher"), 2, "There are no tables", "durable migrate")
    done = celery(shop, "durable", "ps")
    assert done.returncode == 2
    assert "which app?" in done.stderr


WORKER = """
from celery_durable import DurableTask
@app.task(base=DurableTask)
def work(): ...
"""


def test_a_worker_without_tables_or_settings_exits_2(shop: Path) -> None:
    """Bad input "schema missing": as every process, not one error for each message that arrives."""
    worker = ("-A", "shop", "worker", "--pool", "solo")
    (shop / "shop.py").write_text(APP + WORKER)
    quiet = {"PYTHONWARNINGS": "ignore"}  # Celery warns of a worker that runs as root
    assert_one_line(celery(shop, *worker, **quiet), 2, "There are no tables", "durable migrate")
    assert_one_line(celery(shop, *worker, **quiet, CELERY_DURABLE_POLL_MAX_MS="0"), 2, "poll_max_ms")


def test_topics_without_a_kafka_exit_2(shop: Path) -> None:
    """Bad input "Kafka absent"."""
    assert_one_line(durable(shop, "topics", "apply"), 2, "kafka_bootstrap_servers")
    absent = durable(shop, "topics", "apply", CELERY_DURABLE_KAFKA_BOOTSTRAP_SERVERS="127.0.0.1:1")
    assert_one_line(absent, 2, "kafka_bootstrap_servers = '127.0.0.1:1'")


def test_celery_stays_light_with_the_plugin() -> None:
    """Celery imports the plugin whenever it runs: it must bring neither SQL nor Kafka along."""
    script = (
        "import sys, celery_durable.cli\n"
        "heavy = {'sqlalchemy', 'confluent_kafka', 'alembic', 'rich', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=True, timeout=60)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_one_line(shop: Path) -> None:
    """Whatever prints, of a service and of a holder; also what Python would write at its very end."""
    assert durable(shop, "migrate").returncode == 0
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HOLDER_DATABASE_URL": f"sqlite:///{shop / 'holder.sqlite3'}"}
    service, holder = ["-m", "celery", "-A", "shop", "durable"], ["-m", "holder_service.cli"]
    for words in ([*service, "ps"], [*service, "ps", "--json"], [*service, "migrate"], [*holder, "migrate"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, *words],
                cwd=shop,
                env=env,
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=60,
                check=False,
            )
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
        assert "standard output: No space left on device: give it another file" in done.stderr
