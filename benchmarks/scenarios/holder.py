"""How many reports a holder merges and answers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import psutil
import psycopg

from benchmarks.report.record import Figures
from benchmarks.scenario import Bench, Contender, Contenders, Scenario
from benchmarks.setting.child import Failed
from benchmarks.setting.servers import Servers
from benchmarks.systems import durable
from celery_durable.kafka import topics
from celery_durable.permits.messages import AccountReply, AccountReport, Ack, Declared, ReportGroup
from celery_durable.settings import Settings
from tests.e2e.observe import read_topic, write_topic
from tests.harness import Process, Stack, wait_until

CLIENT = "reporter"
ACCOUNTS_BATCHED, ACCOUNTS_SINGLE, ROUNDS = 2_000, 500, 5


class _Reporter:
    """Reports of one client on many accounts, each with a limit of 5: one of its operations ends and one more waits."""

    def __init__(self, stack: Stack, holder: Process, accounts: int) -> None:
        self._stack = stack
        self._holder = holder
        self._settings = Settings(client_id=CLIENT, **stack.kafka.settings)
        topics.apply(self._settings, topics.client_topics(self._settings, CLIENT))
        self._names = [f"tenant:{number}" for number in range(accounts)]
        self._acks: dict[str, Ack] = {}
        self._seq = 0
        self._round = 0
        self._database = psycopg.connect(stack.holder_url.replace("+psycopg", ""), autocommit=True)

    def close(self) -> None:
        """Ends its connection."""
        self._database.close()

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

    def _all_answered(self) -> bool:
        if not self._holder.alive:
            raise Failed(f"the holder ended with {self._holder.returncode}:\n{self._holder.log_tail()}")
        query = "SELECT coalesce(sum(next_offset), 0), (SELECT count(*) FROM holder_outbox) FROM holder_offsets"
        row = self._database.execute(query).fetchone()
        return row is not None and (int(row[0]), int(row[1])) == (self._seq, 0)

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


def _measure(servers: Servers, accounts: int, batch_max: int) -> Figures:
    with servers.stack() as stack:
        holder = durable.start_holder(stack, batch_max=batch_max)
        with contextlib.closing(_Reporter(stack, holder, accounts)) as reporter:
            reporter.report(1)
            process = psutil.Process(holder.pid)
            before = process.cpu_times()
            took_s = reporter.report(ROUNDS)
            after = process.cpu_times()
        reports = ROUNDS * accounts
        cpu_s = after.user + after.system - before.user - before.system
        return {"rate": reports / took_s, "rate_by_its_cpu_time": reports / cpu_s}


@contextlib.contextmanager
def _contenders(bench: Bench) -> Iterator[Contenders]:
    batched, single = bench.count(ACCOUNTS_BATCHED), bench.count(ACCOUNTS_SINGLE)
    yield {
        "batches": Contender(lambda: _measure(bench.servers, batched, 500), f"batch_max 500, {batched} accounts"),
        "one a batch": Contender(lambda: _measure(bench.servers, single, 1), f"batch_max 1, {single} accounts"),
    }


SCENARIOS = (
    Scenario(
        "holder",
        "One holder process. Five reports on each of many accounts that it knows, in turn, are written to Kafka at "
        "once; reports a second until the database has their offsets and Kafka every reply. `rate_by_its_cpu_time`: by "
        "the CPU time of the holder's process, without PostgreSQL's and Kafka's.",
        _contenders,
    ),
)
