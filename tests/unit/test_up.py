"""What ``durable up`` chooses by itself, and what it leaves to the user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_durable.errors import ConfigurationError
from celery_durable.up import Setup, choose, owned


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings from outside the test."""
    import os

    for name in list(os.environ):
        if name.startswith(("CELERY_", "HOLDER_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def chosen_for(
    durable: dict[str, Any],
    *,
    broker: str | None = None,
    environment: dict[str, str | None] | None = None,
    main: str | None = "billing",
) -> Setup:
    app = Celery(main, broker=broker, set_as_current=False)
    app.conf.durable = durable
    return choose(app, "shop.tasks:app", Path("data"), environment or {})


def test_nothing_configured_gives_a_laptop(tmp_path: Path) -> None:
    chosen = chosen_for({})
    assert chosen.client == {
        "CELERY_DURABLE_CLIENT_ID": "billing",
        "CELERY_DURABLE_DATABASE_URL": f"sqlite:///{tmp_path}/data/billing.sqlite3",
        "CELERY_DURABLE_KAFKA_FETCH_WAIT_MAX_MS": "30",
        "CELERY_BROKER_URL": f"durable-spool:///{tmp_path}/data/broker",
    }
    assert chosen.holder == {
        "HOLDER_DATABASE_URL": f"sqlite:///{tmp_path}/data/holder.sqlite3",
        "HOLDER_TOPIC_PREFIX": "celery-durable",
        "HOLDER_KAFKA_FETCH_WAIT_MAX_MS": "30",
    }
    assert chosen.embedded_kafka
    assert chosen.migrates_client
    assert chosen.migrates_holder
    # The other shell needs what the tasks' own settings do not say.
    assert any("export CELERY_DURABLE_CLIENT_ID=billing" in fact for fact in chosen.facts)


def test_an_app_without_a_name_is_called_by_its_module() -> None:
    assert chosen_for({}, main=None).client["CELERY_DURABLE_CLIENT_ID"] == "tasks"


def test_nothing_that_was_configured_is_overridden() -> None:
    durable = {
        "client_id": "mine",
        "database_url": "postgresql+psycopg://me:secret@db/mine",
        "kafka_bootstrap_servers": "kafka:9092",
    }
    chosen = chosen_for(durable, broker="redis://redis/0")
    assert chosen.client == {}
    assert not chosen.embedded_kafka
    # PostgreSQL is the user's to migrate, and a configured Kafka has a holder elsewhere.
    assert not chosen.migrates_client
    assert chosen.holder is None
    assert "secret" not in " ".join(chosen.facts)


def test_a_configured_kafka_gets_a_holder_only_with_its_database() -> None:
    durable = {"kafka_bootstrap_servers": "kafka:9092", "topic_prefix": "mine"}
    chosen = chosen_for(durable, environment={"HOLDER_DATABASE_URL": "sqlite:///holder.db"})
    assert chosen.holder == {"HOLDER_TOPIC_PREFIX": "mine", "HOLDER_KAFKA_BOOTSTRAP_SERVERS": "kafka:9092"}
    assert not chosen.migrates_holder


def test_settings_of_the_holder_from_dotenv_are_kept() -> None:
    chosen = chosen_for({}, environment={"holder_database_url": "sqlite:///mine.db", "HOLDER_TOPIC_PREFIX": None})
    assert chosen.holder is not None
    assert "HOLDER_DATABASE_URL" not in chosen.holder
    assert chosen.holder["HOLDER_TOPIC_PREFIX"] == "celery-durable"


def test_a_wrong_setting_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigurationError, match="heartbeat_timeout_s"):
        chosen_for({"heartbeat_timeout_s": -1})


@pytest.mark.parametrize(
    ("durable", "environment", "names"),
    [
        ({"kafka_session_timeout_ms": 2_000}, {}, "CELERY_DURABLE_KAFKA_SESSION_TIMEOUT_MS"),
        ({}, {"HOLDER_KAFKA_SESSION_TIMEOUT_MS": "2000"}, "HOLDER_KAFKA_SESSION_TIMEOUT_MS"),
    ],
)
def test_a_session_too_short_for_the_embedded_kafka_is_refused(
    durable: dict[str, object], environment: dict[str, str | None], names: str
) -> None:
    """No reader would ever get a partition. Another Kafka is its operator's business."""
    with pytest.raises(ConfigurationError, match=rf"kafka_session_timeout_ms = 2000: .*3000 ms.*set {names} to 6000"):
        chosen_for(durable, environment=environment)
    assert not chosen_for({**durable, "kafka_bootstrap_servers": "k:9092"}, environment=environment).embedded_kafka


def test_two_cannot_share_a_folder(tmp_path: Path) -> None:
    with (
        owned(tmp_path / "data"),
        pytest.raises(ConfigurationError, match="another `durable up`"),
        owned(tmp_path / "data"),
    ):
        pass
    with owned(tmp_path / "data"):
        assert (tmp_path / "data" / ".gitignore").read_text() == "*\n"


def test_a_users_own_folder_keeps_its_gitignore(tmp_path: Path) -> None:
    """``--data .`` must not hide the user's project from git."""
    with owned(tmp_path):
        assert not (tmp_path / ".gitignore").exists()
    (tmp_path / ".gitignore").write_text("*.pyc\n")
    with owned(tmp_path):
        assert (tmp_path / ".gitignore").read_text() == "*.pyc\n"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigurationError, match=r"--data = .*give a folder"), owned(folder):
            pass


def test_a_wrong_database_url_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigurationError, match="database_url"):
        chosen_for({"database_url": "postgresql://me:secret@host:port/db"})
