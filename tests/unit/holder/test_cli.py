"""The command line: what is wrong is one line, with exit code 2."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from click.testing import CliRunner

from holder_service.cli import _print_table, main
from holder_service.usage import Usage


@pytest.mark.parametrize(
    ("words", "wrong", "expected"),
    [
        (["run"], {"DATABASE_URL": ""}, "HOLDER_DATABASE_URL"),
        (["run"], {"KAFKA_BOOTSTRAP_SERVERS": ""}, "HOLDER_KAFKA_BOOTSTRAP_SERVERS"),
        (["run"], {"TURN_MS": "soon"}, "turn_ms = 'soon'"),
        (["run"], {"POLL_MAX_MS": "9000"}, "shutdown_s"),
        (["run"], {}, "holder-service migrate"),
        (["accounts"], {}, "holder-service migrate"),
        (["go", "--all"], {}, "holder-service migrate"),
        (["migrate"], {"DATABASE_URL": "mysql://root:hunter2@h/d"}, "mysql is not supported"),
        (["migrate"], {"DATABASE_URL": "postgresql+psycopg://root:hunter2@127.0.0.1:1/d"}, "does not answer"),
        (["migrate", "--to", "9999"], {}, "9999"),
        (["-l", "LOUD", "migrate"], {}, "LOUD"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], wrong: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each names the field, the value or the remedy; no password is shown (case G5)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    values = {"DATABASE_URL": f"sqlite:///{tmp_path}/h.db", "KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1", **wrong}
    result = CliRunner().invoke(main, words, env={f"HOLDER_{name}": value for name, value in values.items()})
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert expected in lines[0]
    assert "hunter2" not in result.output


def test_go_wants_one_account_or_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never all by mistake."""
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    for words in (["go"], ["go", "acme", "--all"]):
        result = CliRunner().invoke(main, words, env={"HOLDER_DATABASE_URL": f"sqlite:///{tmp_path}/h.db"})
        assert (result.exit_code, "--all" in result.stderr) == (2, True)


def test_a_pipe_gets_each_account_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """For ``grep``, whatever the length of an account's name."""
    name = "tenant:" + "a" * 150
    _print_table([Usage(name, 4, f"rule {name}", False, 1, 2, 1, 1, 1)])
    lines = capsys.readouterr().out.splitlines()
    assert sum(name in line for line in lines) == 1
    assert next(line.count(name) for line in lines if name in line) == 2
