"""The topics' files: complete, true to the code, and compared with what a cluster has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from celery_durable.errors import ConfigurationError
from celery_durable.kafka import topics
from celery_durable.kafka.embedded import EmbeddedBroker
from celery_durable.kafka.schemas import MESSAGES, export, schemas
from celery_durable.kafka.settings import KafkaSettings
from celery_durable.kafka.topics import TopicPlan, TopicResult, apply, client_topics, compare, holder_topics, report
from celery_durable.permits.messages import AccountReply, AccountReport, Ack, ReplyGroup, ReportGroup
from tests.kafka_parts import kafka_settings

FOLDER = Path(__file__).parents[3] / "topics"
PLAN = TopicPlan("p.accounts", 12, {"cleanup.policy": "delete", "retention.ms": "1000"}, "why")


def test_every_topic_of_the_settings_has_a_file() -> None:
    settings = KafkaSettings(topic_prefix="p")
    planned = {plan.name for plan in [*client_topics(settings, "billing"), *holder_topics(settings, ["billing"])]}
    assert planned == {"p.accounts", "p.replies.billing", "p.limits", "p.events", "p.dead-letters"}
    assert len(topics.specs()) == len(planned)


def test_the_message_retention_is_above_the_daily_report() -> None:
    """Section 11: a rebuild needs every client's state in the log."""
    for name in ("accounts", "replies"):
        assert int(topics.specs()[name].config["retention.ms"]) >= 7 * 86_400_000


def test_the_holder_may_ask_for_more_reply_partitions() -> None:
    (*_, replies) = holder_topics(KafkaSettings(), ["billing"], replies_partitions=9)
    assert (replies.name, replies.partitions) == ("celery-durable.replies.billing", 9)


def test_schemas_are_what_the_code_says(tmp_path: Path) -> None:
    """`make schemas` was run after the last change of the messages."""
    export(tmp_path)
    written = {file.name: file.read_text() for file in (FOLDER / "schemas").iterdir()}
    assert written == schemas() == {file.name: file.read_text() for file in tmp_path.iterdir()}


def test_export_removes_what_is_no_message_any_more(tmp_path: Path) -> None:
    (tmp_path / "Old.json").write_text("{}")
    export(tmp_path)
    assert {file.stem for file in tmp_path.iterdir()} == {message.__name__ for message in MESSAGES}


def test_schemas_accept_what_is_sent_and_refuse_the_rest() -> None:
    report = AccountReport(client_id="c", incarnation="i", account="a", seq=1, groups=(ReportGroup(claimed=2),))
    reply = AccountReply(
        client_id="c", incarnation="i", account="a", epoch=1, version=2, answers=1, groups=(ReplyGroup(permits=1),)
    )
    for message in (report, reply.model_copy(update={"ack_wanted": True}), reply):
        schema = json.loads(schemas()[f"{type(message).__name__}.json"])
        Draft202012Validator.check_schema(schema)
        validator = Draft202012Validator(schema)
        body = json.loads(message.to_bytes())
        assert validator.is_valid(body)
        for change in ({"v": 2}, {"account": ""}, {"account": 7}, {"groups": "all"}):
            assert not validator.is_valid({**body, **change})
    assert Ack(epoch=1, version=2) == reply.ack


def test_asyncapi_names_every_message_and_channel() -> None:
    document = yaml.safe_load((FOLDER / "asyncapi.yaml").read_text())
    assert document["asyncapi"] == "3.0.0"
    carried = {
        channel["address"].split(".", 1)[1].removesuffix(".{client_id}"): set(channel["messages"])
        for channel in document["channels"].values()
    }
    for name, spec in topics.specs().items():
        if spec.messages:
            assert carried[name] == set(spec.messages)
    assert set().union(*carried.values()) == {message.__name__ for message in MESSAGES} | {"DeadLetter"}
    assert {spec for spec in topics.specs() if not topics.specs()[spec].optional} == set(carried)

    def check(node: Any) -> None:
        if isinstance(node, list):
            for one in node:
                check(one)
        if not isinstance(node, dict):
            return
        reference = node.get("$ref")
        if reference is None:
            for one in node.values():
                check(one)
        elif reference.startswith("#/"):
            target = document
            for part in reference[2:].split("/"):
                target = target[part]
        else:
            assert (FOLDER / reference).is_file()

    check(document)


@pytest.mark.parametrize(
    ("partitions", "config", "words"),
    [
        (12, {"cleanup.policy": "delete", "retention.ms": "1000"}, []),
        (24, {"cleanup.policy": "delete", "retention.ms": "-1"}, []),
        (12, {"cleanup.policy": "delete", "retention.ms": "2000"}, []),
        (4, {"cleanup.policy": "delete", "retention.ms": "1000"}, ["partitions: 4, should be at least 12"]),
        (12, {"cleanup.policy": "compact", "retention.ms": "10"}, ["cleanup.policy: compact", "retention.ms: 10,"]),
        (12, {"cleanup.policy": "compact,delete", "retention.ms": "1000"}, ["cleanup.policy: compact,delete"]),
        (12, {"retention.ms": "1000"}, ["cleanup.policy: None"]),
    ],
)
def test_compare(partitions: int, config: dict[str, str], words: list[str]) -> None:
    differences = compare(PLAN, partitions, config)
    assert len(differences) == len(words)
    for difference, word in zip(differences, words, strict=True):
        assert word in difference
        assert "--topic p.accounts" in difference


def test_report_prints_plain_lines_into_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 300
    results = [TopicResult("p.a", "created"), TopicResult("p.b", "differs", [long, "[red]two[/red]"])]
    assert report(results) == 1
    assert capsys.readouterr().out.splitlines() == ["p.a: created", "p.b: differs", f"  {long}", "  [red]two[/red]"]
    assert report([TopicResult("p.a", "ok"), TopicResult("p.e", "unused")]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("p.e: unused: it is optional")


def test_the_embedded_broker_says_that_there_is_nothing_to_apply() -> None:
    with EmbeddedBroker() as broker:
        settings = kafka_settings(broker.bootstrap_servers)
        with pytest.raises(ConfigurationError, match="embedded broker, which has no admin API"):
            apply(settings, client_topics(settings, "billing"))


def test_kafka_away_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery_durable.kafka.client.ANSWER_S", 0.5)
    settings = kafka_settings("127.0.0.1:23098")
    with pytest.raises(ConfigurationError, match=r"kafka_bootstrap_servers = '127.0.0.1:23098': Kafka does not answer"):
        apply(settings, client_topics(settings, "billing"))
