"""A client that only reports: what holders are given to merge and to answer."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psycopg

from benchmarks.setting.child import Failed
from celery_durable.kafka import topics
from celery_durable.kafka.client import make_admin
from celery_durable.permits.messages import AccountReply, AccountReport, Ack, Declared, ReportGroup
from celery_durable.settings import Settings
from holder_service import topic
from tests.e2e.observe import read_topic, write_topic
from tests.harness import Process, Stack, wait_until

CLIENT = "reporter"


class Reporter:
    """Reports of one client on many accounts, each with a limit of 5: one of its operations ends and one more waits.

    Nobody else may report meanwhile.
    """

    def __init__(self, stack: Stack, holders: Sequence[Process], accounts: int) -> None:
        self._stack = stack
        self._holders = holders
        self._settings = Settings(client_id=CLIENT, **stack.kafka.settings)
        topics.apply(self._settings, topics.client_topics(self._settings, CLIENT))
        self._names = [f"tenant:{number}" for number in range(accounts)]
        self._acks: dict[str, Ack] = {}
        self._seq = 0
        self._round = 0
        self._before = self._reported()
        self._database = psycopg.connect(stack.holder_url.replace("+psycopg", ""), autocommit=True)

    def close(self) -> None:
        """Ends its connection."""
        self._database.close()

    def until_shared(self) -> None:
        """Waits until every holder has partitions."""
        admin = make_admin(self._settings)
        group = _group(self._stack)

        def members() -> int:
            self._check_alive()
            found = admin.describe_consumer_groups([group], request_timeout=5.0)[group].result()
            return sum(bool(member.assignment.topic_partitions) for member in found.members)

        wait_until(lambda: members() == len(self._holders), 60, what=f"{len(self._holders)} holders have partitions")

    def report(self, rounds: int) -> float:
        """So many reports on every account, written at once; seconds until the last is merged and answered in Kafka."""
        letters = []
        for _ in range(rounds):
            self._round += 1
            letters += [(name, self._report(name)) for name in self._names]
        began = time.monotonic()
        write_topic(self._stack.kafka, self._settings.accounts_topic, letters, **{"linger.ms": 5})
        wait_until(self._all_answered, 240, what=f"{len(letters)} reports are answered")
        took_s = time.monotonic() - began
        self._check()
        return took_s

    def _report(self, name: str) -> bytes:
        self._seq += 1
        report = AccountReport(
            client_id=CLIENT,
            incarnation="one",
            account=name,
            seq=self._seq,
            ack=self._acks.get(name),
            groups=(ReportGroup(claimed=self._round, released=self._round - 1, waiting=1 + self._round % 2),),
            declared=Declared(limit=5),
        )
        return report.model_dump_json().encode()

    def _reported(self) -> int:
        view = topic.view(self._settings, self._settings.accounts_topic, _group(self._stack))
        return sum(extent.high for extent in view.partitions.values())

    def _all_answered(self) -> bool:
        self._check_alive()
        query = "SELECT coalesce(sum(next_offset), 0), (SELECT count(*) FROM holder_outbox) FROM holder_offsets"
        row = self._database.execute(query).fetchone()
        return row is not None and (int(row[0]), int(row[1])) == (self._before + self._seq, 0)

    def _check_alive(self) -> None:
        for holder in self._holders:
            if not holder.alive:
                raise Failed(f"the holder ended with {holder.returncode}:\n{holder.log_tail()}")

    def _check(self) -> None:
        """The newest reply on each account answers its newest report."""
        newest: dict[str, AccountReply] = {}
        for letter in read_topic(self._stack.kafka, self._settings.replies_topic(CLIENT)):
            newest[letter.key] = AccountReply.model_validate_json(letter.body)
        first = self._seq - len(self._names) + 1
        answered = [newest[name].answers if name in newest else 0 for name in self._names]
        if answered != list(range(first, self._seq + 1)):
            raise Failed("the holder has not answered the newest report of every account")
        self._acks = {name: newest[name].ack for name in self._names}


def _group(stack: Stack) -> str:
    return f"{stack.kafka.topic_prefix}-holder"
