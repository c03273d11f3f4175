"""The holder's settings: where they come from, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from celery_durable.errors import ConfigurationError
from holder_service.settings import HolderSettings, load


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_environment_wins_over_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text('HOLDER_TURN_MS=300\nHOLDER_BATCH_MAX=7\nHOLDER_LIMITS={"tenant": 4}\n')
    monkeypatch.setenv("HOLDER_BATCH_MAX", "9")
    settings = load(database_url="sqlite:///x")
    assert (settings.turn_ms, settings.batch_max, settings.limits) == (300, 9, {"tenant": 4})


def test_rules_and_times_reach_the_decisions() -> None:
    decisions = load(
        database_url="sqlite:///x", limits={"*": 3}, group_limits={"tenant": 2}, claim_window_s=2.5, turn_ms=50
    ).semaphore()
    assert decisions.rules.accounts == {"*": 3}
    assert decisions.rules.group_limits == {"tenant": 2}
    assert (decisions.claim_window_ms, decisions.turn_ms, decisions.forfeit_after_ms) == (2_500, 50, None)


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"turn_ms": 0}, ["turn_ms = 0", "HOLDER_TURN_MS"]),
        ({"batch_max": "many"}, ["batch_max = 'many'", "HOLDER_BATCH_MAX"]),
        ({"limits": {"tenant": -1}}, ["limits.tenant = -1", "HOLDER_LIMITS"]),
        ({"limits": {"tenant": 1.5}}, ["limits.tenant = 1.5"]),
        ({"limits": {"tenant": True}}, ["limits.tenant = True"]),
        ({"limits": {"tenant": "3"}}, ["limits.tenant = '3'"]),
        ({"limits": {"": 3}}, ["limits"]),
        ({"claim_window_s": 20, "claim_window_max_s": 10}, ["claim_window_s = 20", "claim_window_max_s"]),
        ({"reporting_lifetime_s": 600, "forfeit_after_s": 60}, ["reporting_lifetime_s = 600", "forfeit_after_s"]),
        (
            {"kafka_session_timeout_ms": 60_000, "kafka_max_poll_interval_ms": 10_000},
            ["kafka_session_timeout_ms = 60000", "kafka_max_poll_interval_ms"],
        ),
        (
            {"poll_max_ms": 9_000, "shutdown_s": 5},
            ["poll_max_ms = 9000", "shutdown_s = 5", "poll_max_ms to 5000", "shutdown_s to 9 at"],
        ),
        ({"database_pool_size": True}, ["database_pool_size = True"]),
        ({"turnms": 5}, ["turnms", "turn_ms"]),
    ],
)
def test_a_wrong_value_is_refused_in_one_line_with_its_remedy(wrong: dict[str, object], names: list[str]) -> None:
    """Case E6, and the combinations that cannot work."""
    with pytest.raises(ConfigurationError) as caught:
        load(database_url="sqlite:///x", **wrong)
    message = str(caught.value)
    assert all(name in message for name in names), message
    assert "\n" not in message


def test_a_missing_database_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"database_url is not set: .*HOLDER_DATABASE_URL"):
        load()


def test_no_message_shows_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case G5."""
    with pytest.raises(ConfigurationError) as wrong_type:
        load(database_url=["postgresql://u:hunter2@h/d"], turn_ms=0)
    monkeypatch.setenv("HOLDER_KAFKA_OPTIONS", "{sasl.password: hunter2")
    with pytest.raises(ConfigurationError) as no_json:
        load(database_url="sqlite:///x")
    monkeypatch.delenv("HOLDER_KAFKA_OPTIONS")
    for caught in (wrong_type, no_json):
        assert "hunter2" not in str(caught.value)
        assert caught.value.__cause__ is None
    assert "hunter2" not in repr(HolderSettings(database_url="postgresql://u:hunter2@h/d", kafka_options={}))


def test_an_unknown_variable_is_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("HOLDER_TURNMS", "5")
    load(database_url="sqlite:///x")
    assert "HOLDER_TURNMS: there is no such setting, did you mean 'HOLDER_TURN_MS'?" in caplog.text
