"""Settings: where they come from, and what is refused in one line."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_durable.errors import ConfigurationError
from celery_durable.settings import load

GOOD = {"client_id": "billing", "database_url": "sqlite:///x"}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def app_with(**values: Any) -> Celery:
    app = Celery("x", set_as_current=False)
    app.conf.durable = values
    return app


def test_the_app_wins_over_the_environment_over_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(".env").write_text(
        "CELERY_DURABLE_CLIENT_ID=file\nCELERY_DURABLE_POLL_MAX_MS=300\nCELERY_DURABLE_SENDS_MAX=7\n"
    )
    monkeypatch.setenv("CELERY_DURABLE_CLIENT_ID", "environment")
    monkeypatch.setenv("CELERY_DURABLE_POLL_MAX_MS", "400")
    settings = load(app_with(client_id="app", database_url="sqlite:///x"))
    assert (settings.client_id, settings.poll_max_ms, settings.sends_max) == ("app", 400, 7)
    assert load(app_with(**GOOD), sends_max=9).sends_max == 9


def test_a_file_that_is_no_text() -> None:
    Path(".env").write_bytes(b"CELERY_DURABLE_CLIENT_ID=\xff\xfe")
    with pytest.raises(ConfigurationError, match=r"\.env: it cannot be read .*save it as UTF-8"):
        load(app_with(**GOOD))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            {"heartbeat_timeout_s": 5},
            [
                "heartbeat_interval_s = 10 is above half of heartbeat_timeout_s = 5",
                "set heartbeat_interval_s to 2.5 at most, or heartbeat_timeout_s to 20 at least",
            ],
        ),
        ({"resend_min_s": 500}, ["resend_min_s = 500", "resend_max_s = 300"]),
        ({"poll_min_ms": 500}, ["poll_min_ms = 500", "poll_max_ms"]),
        ({"kafka_session_timeout_ms": 70_000}, ["kafka_session_timeout_ms = 70000", "kafka_max_poll_interval_ms"]),
        (
            {"kafka_linger_ms": 60, "kafka_publish_deadline_ms": 100},
            ["kafka_linger_ms = 60", "half of kafka_publish_deadline_ms = 100"],
        ),
        ({"client_id": ""}, ["client_id is not set", "CELERY_DURABLE_CLIENT_ID"]),
        (
            {"client_id": "a b"},
            ["client_id = 'a b': only letters, digits, '.', '_' and '-'", "CELERY_DURABLE_CLIENT_ID"],
        ),
        ({"database_url": ""}, ["database_url is not set", 'app.conf.durable["database_url"]']),
        ({"table_prefix": "My-"}, ["table_prefix = 'My-'", "lower-case letters, digits and '_'"]),
        ({"topic_prefix": "a/b"}, ["topic_prefix = 'a/b': only letters, digits, '.', '_' and '-'"]),
        ({"clientid": "x"}, ["app.conf.durable['clientid']", "did you mean 'client_id'"]),
        ({"CELERY_DURABLE_CLIENT_ID": "x"}, ["durable['CELERY_DURABLE_CLIENT_ID']", "did you mean 'client_id'"]),
        ({"sends_max": True}, ["sends_max = True", "boolean"]),
        ({"sends_max": 2.5}, ["sends_max = 2.5", "CELERY_DURABLE_SENDS_MAX"]),
        ({"idle_return_s": float("nan")}, ["idle_return_s = nan"]),
        ({"retention_s": -1}, ["retention_s = -1", "greater than or equal to 0"]),
        ({"kafka_options": "secret"}, ["kafka_options = (hidden)"]),
        ({"database_url": 5}, ["database_url = (hidden)"]),
    ],
)
def test_wrong_settings_are_refused_in_one_line(values: dict[str, Any], says: list[str]) -> None:
    """Field, value and remedy. G5: never a password."""
    with pytest.raises(ConfigurationError) as caught:
        load(app_with(**{**GOOD, **values}))
    message = str(caught.value)
    assert all(part in message for part in says), message
    assert "\n" not in message
    assert "secret" not in message


def test_several_wrong_settings_are_all_named() -> None:
    with pytest.raises(ConfigurationError, match=r"sends_max = 0.*poll_max_ms = 0"):
        load(app_with(**GOOD, sends_max=0, poll_max_ms=0))


def test_passwords_never_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """G5"""
    values = {"database_url": "postgresql://u:secret@h/x", "kafka_options": {"sasl.password": "secret"}}
    assert "secret" not in repr(load(app_with(**{**GOOD, **values})))
    monkeypatch.setenv("CELERY_DURABLE_KAFKA_OPTIONS", "{secret")
    with pytest.raises(ConfigurationError, match="kafka_options") as caught:
        load(app_with(**GOOD))
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_settings_of_the_app_must_be_a_dictionary() -> None:
    app = Celery("x", set_as_current=False)
    app.conf.durable = "sqlite:///x"
    with pytest.raises(ConfigurationError, match=r"app.conf.durable is of type str"):
        load(app)


def test_an_unknown_name_in_the_environment_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CELERY_DURABLE_CLIENTID", "x")
    with caplog.at_level(logging.WARNING):
        load(app_with(**GOOD))
    assert "CELERY_DURABLE_CLIENTID: there is no such setting, did you mean 'CELERY_DURABLE_CLIENT_ID'?" in caplog.text


def test_it_is_told_too_when_another_setting_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CELERY_DURABLE_CLIENTID", "x")
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigurationError):
        load(app_with(**GOOD, poll_min_ms=0))
    assert "CELERY_DURABLE_CLIENTID: there is no such setting" in caplog.text


def test_an_unknown_name_in_the_file_is_told(caplog: pytest.LogCaptureFixture) -> None:
    Path(".env").write_text("CELERY_DURABLE_SEND_MAX=7\nUNRELATED=1\n")
    with caplog.at_level(logging.WARNING):
        load(app_with(**GOOD))
    assert "CELERY_DURABLE_SEND_MAX in .env: there is no such setting" in caplog.text
    assert "did you mean 'CELERY_DURABLE_SENDS_MAX'?" in caplog.text
    assert "UNRELATED" not in caplog.text


def test_what_is_required_depends_on_the_process() -> None:
    assert load(None, required=()).client_id == ""
    with pytest.raises(ConfigurationError, match="kafka_bootstrap_servers is not set"):
        load(app_with(**GOOD), required=("kafka_bootstrap_servers",))
