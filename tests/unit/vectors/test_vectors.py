"""topics/vectors against both pure cores, the JSON Schemas, and the rules in topics/protocol.md that they show."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, ValidationError

from celery_durable.kafka.dead_letters import why_unreadable
from celery_durable.kafka.received import Received
from celery_durable.permits.messages import AccountReport, read_reply
from holder_service import inbox
from holder_service.account import Client as HolderClient
from holder_service.account import Entry, Pair
from holder_service.footprint import footprint
from tests.simulation.mutations import broken
from tests.unit.vectors import form
from tests.unit.vectors.client import Client, wire
from tests.unit.vectors.form import FOLDER, ClientVector, FootprintVector, HolderVector, ReaderVector
from tests.unit.vectors.holder import Holder

FILES = form.files()
PROTOCOL = FOLDER.parent / "protocol.md"
SCHEMAS = {
    path.stem: Draft202012Validator(json.loads(path.read_text())) for path in (FOLDER.parent / "schemas").glob("*.json")
}

TYPES = {"accounts": {"AccountReport", "SetLimit", "Pause", "Resume", "Forfeit"}, "replies": {"AccountReply"}}


def named(path: Path) -> str:
    return path.stem


def of(core: str) -> list[Path]:
    return [path for path in FILES if path.name.startswith(f"{core}-")]


def plain(value: BaseModel | None) -> Any:
    """Without what has its default, so that a difference is short."""
    return None if value is None else value.model_dump(exclude_defaults=True)


def run_client(path: Path) -> None:
    vector = form.read(path)
    assert isinstance(vector, ClientVector)
    client = Client(vector.database, vector.before)
    for number, step in enumerate(vector.steps, 1):
        after, output = client.run(step.input)
        if step.output.shown is None:
            output.shown = None
        assert (number, plain(output)) == (number, plain(step.output)), step.about
        assert (number, plain(after)) == (number, plain(step.after)), step.about


def run_holder(path: Path) -> None:
    vector = form.read(path)
    assert isinstance(vector, HolderVector)
    holder = Holder(vector.database, vector.before)
    for number, step in enumerate(vector.steps, 1):
        after, output = holder.run(step.input)
        refused, output.refused = output.refused, step.output.refused
        assert len(refused) == len(step.output.refused), refused
        for reason, part in zip(refused, step.output.refused, strict=True):
            assert part in reason
        assert (number, plain(output)) == (number, plain(step.output)), step.about
        assert (number, plain(after)) == (number, plain(step.after)), step.about


@pytest.mark.parametrize("path", of("client"), ids=named)
def test_the_client(path: Path) -> None:
    run_client(path)


@pytest.mark.parametrize("path", of("holder"), ids=named)
def test_the_holder(path: Path) -> None:
    run_holder(path)


@pytest.mark.parametrize(
    ("violation", "shown_by"),
    [
        ("count only the newest reply", "holder-lowered-lease"),
        ("ignore keeps", "client-given-back"),
        ("skip the wait for the new epoch", "holder-new-epoch"),
        ("keep a dead client's demand", "holder-grant-lost"),
        ("free on silence", "holder-silence"),
    ],
)
def test_a_broken_rule_fails_the_vector_that_shows_it(violation: str, shown_by: str) -> None:
    run = run_client if shown_by.startswith("client-") else run_holder
    with broken(violation), pytest.raises(AssertionError):
        run(FOLDER / f"{shown_by}.json")


@pytest.mark.parametrize("path", of("footprint"), ids=named)
def test_the_footprint(path: Path) -> None:
    vector = form.read(path)
    assert isinstance(vector, FootprintVector)
    for case in vector.cases:
        pair = Pair(
            claimed=case.claimed,
            used=case.claimed - case.released,
            entries=[Entry(**entry.model_dump()) for entry in case.entries],
            offered=case.offered,
        )
        assert footprint(HolderClient("i"), pair) == case.footprint, case.about


@pytest.mark.parametrize("path", of("reader"), ids=named)
def test_the_reader(path: Path) -> None:
    vector = form.read(path)
    assert isinstance(vector, ReaderVector)
    for message in vector.messages:
        body = None if message.body is None else message.body.encode()
        if message.topic == "accounts":
            found = inbox.read(Received("accounts", 0, 0, message.key.encode(), body, ()))
            read, reason = (None, found.reason) if isinstance(found, inbox.Unreadable) else (wire(found), None)
        else:
            try:
                read, reason = wire(read_reply(body or b"")), None
            except ValidationError as error:
                read, reason = None, why_unreadable(error)
        assert read == message.read_as, message.about
        assert (reason is None) == (message.refused is None), (message.about, reason)
        assert message.refused is None or message.refused in (reason or ""), (message.about, reason)


def messages(document: Any) -> Iterator[dict[str, Any]]:
    """Every message anywhere in the document."""
    if isinstance(document, dict):
        if "type" in document and "v" in document:
            yield document
        for value in document.values():
            yield from messages(value)
    elif isinstance(document, list):
        for value in document:
            yield from messages(value)


@pytest.mark.parametrize("path", FILES, ids=named)
def test_the_schemas_accept_every_message(path: Path) -> None:
    found = list(messages(json.loads(path.read_text())))
    assert found or path.name in ("footprint-formula.json", "reader-refused.json")
    for message in found:
        SCHEMAS[message["type"]].validate(message)


@pytest.mark.parametrize("path", of("reader"), ids=named)
def test_the_schemas_refuse_what_a_reader_refuses(path: Path) -> None:
    """What a schema can say it says: whoever validates with one refuses no less than the holder, but for the key."""
    vector = form.read(path)
    assert isinstance(vector, ReaderVector)
    looked_at = 0
    for message in vector.messages:
        try:
            document = json.loads(message.body or "")
        except json.JSONDecodeError:
            continue
        if not isinstance(document, dict) or document.get("type") not in TYPES[message.topic]:
            continue
        if "key" in (message.refused or "") or "topic's name" in (message.refused or ""):
            continue
        looked_at += 1
        assert SCHEMAS[document["type"]].is_valid(document) == (message.refused is None), message.about
    assert looked_at


def test_every_file_is_named_as_it_says_and_shows_a_rule() -> None:
    rules = set(re.findall(r"^\*\*([MCH]\d+)\.", PROTOCOL.read_text(), flags=re.MULTILINE))
    assert len(rules) > 30
    shown: set[str] = set()
    for path in FILES:
        vector = form.read(path)
        assert vector.name == path.stem
        assert path.name.startswith(f"{vector.core}-")
        assert vector.about.endswith(".")
        assert set(vector.rules) <= rules, path.name
        shown |= set(vector.rules)
    unshown = set(re.findall(r"([MCH]\d+)", PROTOCOL.read_text().partition("No vector shows")[2]))
    assert shown | unshown == rules
    assert not shown & unshown


def test_every_report_in_a_client_row_is_of_that_client() -> None:
    for path in of("client"):
        vector = form.read(path)
        assert isinstance(vector, ClientVector)
        rows = [vector.before, *(step.after for step in vector.steps)]
        for row in rows:
            if row is not None and row.report is not None:
                report = AccountReport.model_validate_json(json.dumps(row.report))
                assert (report.client_id, report.incarnation) == (
                    vector.database.client_id,
                    vector.database.incarnation,
                )


@pytest.mark.parametrize("name", ["first-operation", "grant", "given-back"])
def test_both_sides_of_a_conversation_have_the_same_messages(name: str) -> None:
    client, holder = form.read(FOLDER / f"client-{name}.json"), form.read(FOLDER / f"holder-{name}.json")
    assert isinstance(client, ClientVector)
    assert isinstance(holder, HolderVector)
    heard = [message for step in holder.steps for message in step.input.messages]
    said = {(reply["version"], reply["answers"]): reply for step in holder.steps for reply in step.output.replies}
    reports = [step.output.report for step in client.steps if step.output.report is not None]
    assert reports
    assert all(report in heard for report in reports)
    replies = {
        (step.input.reply["version"], step.input.reply["answers"]): step.input.reply
        for step in client.steps
        if step.input.reply
    }
    common = replies.keys() & said.keys()
    assert common
    assert all(replies[key] == said[key] for key in common)
