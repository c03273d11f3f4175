"""What bodies note is read while others are being noted."""

from __future__ import annotations

from pathlib import Path

from tests.chaos import history
from tests.example.records import read_records, write_record


def test_a_line_that_is_being_written_is_not_there_yet(tmp_path: Path) -> None:
    path = tmp_path / "records"
    assert read_records(path) == []
    for name in ("one", "two"):
        write_record(path, event="start", operation_id=name, run=name, account="acme")
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert [record.operation_id for record in read_records(path)] == ["one"]
    path.write_bytes(whole)
    assert [record.operation_id for record in read_records(path)] == ["one", "two"]


def test_so_it_is_in_a_history(tmp_path: Path) -> None:
    path = tmp_path / "history"
    assert history.read(path) == []
    history.write(path, history.Beat(operation="one", token="t"), history.Beat(operation="two", token="t"))
    path.write_bytes(path.read_bytes()[:-20])
    assert [event.operation for event in history.read(path) if isinstance(event, history.Beat)] == ["one"]
