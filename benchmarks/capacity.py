"""What a deployment needs that no test machine can run: ``python -m benchmarks.capacity --accounts 10000000 …``.

A calculation, not a measurement. It multiplies what is measured: messages, bytes and rows of each situation
(:mod:`benchmarks.protocol_costs`), a holder's reports a second (scenario ``holder`` of the newest stored run), and the
statements of docs/performance.md. What is assumed is an option with its default.

Holders of one database decide one after the other, since they draw from one counter of versions: another holder takes
over when one is lost, and adds no throughput (scenario ``growth-holders``). What is more than one database can take is
split into several, each with a ``topic_prefix`` and services of its own: services of different ones share no account.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.protocol_costs import DAY_MS, KEY_BYTES, Costs, costs
from benchmarks.report import cost_table
from benchmarks.report.cost_table import Step
from benchmarks.report.figures import median
from benchmarks.report.record import Run, load_all, newest_of_each
from benchmarks.report.tables import NOT_MEASURED, number, table
from celery_durable.kafka.topics import specs
from celery_durable.permits.state import QueueSettings
from celery_durable.settings import Settings
from holder_service.settings import HolderSettings

DAY_S = DAY_MS / 1000
RECORD_BYTES = 61 + 12
"""Kafka's header of a batch and of a record: each message alone in its batch, not compressed."""
ROW_BYTES = 24 + 4 + 40
"""PostgreSQL's header of a row, its pointer, and the numbers of an account's row."""
INDEX_BYTES = 2 * 32
"""An entry in each of two indexes, with their pages' free space."""
HOLDERS_A_DATABASE = 2
"""One takes over when the other is lost."""
CLIENTS_OF_KAFKA = 2
"""A producer and a consumer, in each dispatcher and holder."""
GB, MB = 1e9, 1e6


def _given(default: float, what: str) -> Any:
    return field(default=default, metadata={"help": what})


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is asked for, and what is assumed."""

    services: int = _given(100, "services, each with a database and a dispatcher")
    accounts: int = _given(10_000_000, "accounts that exist; those in which nothing happens cost nothing")
    services_per_account: float = _given(2.0, "services that use an account of those that are active or wait")
    active: float = _given(0.01, "share of the accounts in which a permit is used or leased, at any moment")
    waiting: float = _given(0.001, "share of the accounts in which operations wait for a permit, at any moment")
    calls: float = _given(1_000.0, "calls a second, of all services together")
    cold: float = _given(0.5, "share of the calls that find no lease: their account is called less than every 20 s")
    run_s: float = _given(1.0, "how long a call runs")
    utilisation: float = _given(0.5, "share of a holder's measured rate that is used")
    retention_days: float = _given(7.0, "retention of the topics")
    replication: int = _given(3, "copies of each partition")
    brokers: int = _given(3, "Kafka brokers")
    read_mb: float = _given(50.0, "MB a second that a rebuild reads from Kafka")
    kept_days: float = _given(7.0, "how long a service keeps ended operations (retention_s)")
    operation_bytes: float = _given(1_500.0, "bytes of an operation with arguments, result and indexes")
    bloat: float = _given(2.0, "space of a table whose rows are often rewritten, over that of its rows")


@dataclass(frozen=True, slots=True)
class Needs:
    """What it takes. Bytes a second and bytes are of all holder databases, or of all services, together."""

    call_reports: float
    active_reports: float
    waiting_reports: float
    reports: float
    replies: float
    report_bytes: float
    reply_bytes: float
    kafka_in: float
    kafka_out: float
    kafka_stored: float
    partitions: int
    kafka_connections: int
    databases: int
    holder_cores: float
    holder_rows: float
    holder_bytes: float
    holder_connections: int
    service_rows: float
    service_bytes: float
    service_statements: float
    service_commits: float
    rebuild_reports: float
    rebuild_s: float


@dataclass(frozen=True, slots=True)
class Basis:
    """What was measured or counted.

    :param holder_rate: reports a second of one holder database. :param holder_cpu_rate: by its process's CPU time.
    :param cold: what a call without a lease does in its service's database. :param leased: one with a lease.
    """

    said: Costs
    holder_rate: float
    holder_cpu_rate: float
    cold: Step
    leased: Step


def needs(of: Deployment, by: Basis) -> Needs:
    """The calculation."""
    cost, holder_rate, holder_cpu_rate = by.said, by.holder_rate, by.holder_cpu_rate
    cold_calls = of.calls * of.cold
    active, waiting = (of.accounts * share * of.services_per_account for share in (of.active, of.waiting))
    situations = ((cold_calls, cost.call), (active / DAY_S, cost.held), (waiting / DAY_S, cost.waiting))
    call_reports, active_reports, waiting_reports = (times * said.reports for times, said in situations)
    reports = call_reports + active_reports + waiting_reports
    replies = sum(times * said.replies for times, said in situations)
    around = RECORD_BYTES + KEY_BYTES
    report_bytes = sum(times * said.report_bytes for times, said in situations) + reports * around
    reply_bytes = sum(times * said.reply_bytes for times, said in situations) + replies * around
    said = report_bytes + reply_bytes
    retention_s = of.retention_days * DAY_S
    databases = max(1, math.ceil(reports / (holder_rate * of.utilisation)))
    holders = databases * HOLDERS_A_DATABASE
    leased = cold_calls * (of.run_s + QueueSettings("", "").idle_return_ms / 1000)
    holder_rows = of.accounts * (of.active + of.waiting) + leased
    row = ROW_BYTES + INDEX_BYTES + 2 * KEY_BYTES
    holder_row = row + cost.holder_row + (of.services_per_account - 1) * cost.holder_row_more
    service_rows = active + waiting + leased
    kept = of.calls * of.kept_days * DAY_S
    shared = ("accounts", "limits", "dead-letters")
    partitions = databases * sum(specs()[name].partitions for name in shared)
    partitions += of.services * specs()["replies"].partitions
    return Needs(
        call_reports=call_reports,
        active_reports=active_reports,
        waiting_reports=waiting_reports,
        reports=reports,
        replies=replies,
        report_bytes=report_bytes,
        reply_bytes=reply_bytes,
        kafka_in=said * of.replication,
        kafka_out=said,
        kafka_stored=said * retention_s * of.replication,
        partitions=partitions * of.replication,
        kafka_connections=(of.services + holders) * CLIENTS_OF_KAFKA * of.brokers,
        databases=databases,
        holder_cores=reports / holder_cpu_rate,
        holder_rows=holder_rows,
        holder_bytes=holder_rows * holder_row * of.bloat,
        holder_connections=HOLDERS_A_DATABASE * 2 * _default(HolderSettings, "database_pool_size"),
        service_rows=service_rows,
        service_bytes=service_rows * (row + cost.client_row) * of.bloat + kept * of.operation_bytes,
        service_statements=cold_calls * by.cold.statements + (of.calls - cold_calls) * by.leased.statements,
        service_commits=cold_calls * by.cold.commits + (of.calls - cold_calls) * by.leased.commits,
        rebuild_reports=reports * retention_s / databases,
        rebuild_s=retention_s / databases * (report_bytes / (of.read_mb * MB) + reports / holder_rate),
    )


def _default(settings: type[Settings] | type[HolderSettings], name: str) -> int:
    return int(settings.model_fields[name].default)


Line = tuple[str, str, str]
"""What, how much, and from what."""


def lines(of: Deployment, by: Basis) -> list[Line]:
    """The needs in words, each with what it is computed from."""
    n, cost, holder_rate, holder_cpu_rate = needs(of, by), by.said, by.holder_rate, by.holder_cpu_rate
    used_by = f"x {of.services_per_account:g} services"
    hours = n.rebuild_s / 3600
    pool = _default(Settings, "database_pool_size")
    return [
        ("reports of calls without a lease", f"{number(n.call_reports)} /s",
         f"{of.calls:,g} calls /s x {of.cold:g} without a lease x {cost.call.reports} reports"),
        ("reports of active accounts", f"{number(n.active_reports)} /s",
         f"{of.accounts:,} accounts x {of.active:g} {used_by} x {cost.held.reports} a day"),
        ("reports of accounts that only wait", f"{number(n.waiting_reports)} /s",
         f"{of.accounts:,} accounts x {of.waiting:g} {used_by} x {cost.waiting.reports} a day, the daily one included"),
        ("reports and replies", f"{number(n.reports)} and {number(n.replies)} /s", "their sums"),
        ("holder databases", f"{n.databases}",
         f"reports / ({number(holder_rate)} /s measured x {of.utilisation:g} used), rounded up"),
        ("holders", f"{n.databases * HOLDERS_A_DATABASE}", f"{HOLDERS_A_DATABASE} a database: one takes over"),
        ("CPU of holders", f"{number(n.holder_cores)} cores",
         f"reports / {number(holder_cpu_rate)} a second of its process's CPU time"),
        ("Kafka, written", f"{number(n.kafka_in / MB)} MB/s",
         f"({number(n.report_bytes / n.reports)} bytes a report, {number(n.reply_bytes / n.replies)} a reply, "
         f"{RECORD_BYTES + KEY_BYTES} of them Kafka's and the key's) x {of.replication} copies"),
        ("Kafka, read", f"{number(n.kafka_out / MB)} MB/s", "each message once"),
        ("Kafka, stored", f"{number(n.kafka_stored / GB)} GB", f"what is written x {of.retention_days:g} days"),
        ("Kafka, partitions with their copies", f"{n.partitions:,}",
         f"({n.databases} x the common topics + {of.services} services x {specs()['replies'].partitions}) "
         f"x {of.replication}"),
        ("Kafka, connections", f"{n.kafka_connections:,}",
         f"({of.services} dispatchers + {n.databases * HOLDERS_A_DATABASE} holders) x {CLIENTS_OF_KAFKA} clients "
         f"x {of.brokers} brokers"),
        ("holder databases, accounts' rows", f"{number(n.holder_rows)}",
         f"{of.accounts:,} x ({of.active:g} + {of.waiting:g}), and of calls without a lease"),
        ("holder databases, size", f"{number(n.holder_bytes / GB)} GB",
         f"{cost.holder_row} bytes of state and {cost.holder_row_more} for each further service, "
         f"PostgreSQL's {ROW_BYTES + INDEX_BYTES} and {2 * KEY_BYTES} of the name, x {of.bloat:g}"),
        ("holder database, connections", f"{n.holder_connections} each",
         f"{HOLDERS_A_DATABASE} holders x 2 pools of {_default(HolderSettings, 'database_pool_size')}"),
        ("a service's database, accounts' rows", f"{number(n.service_rows / of.services)}", "all, shared evenly"),
        ("a service's database, size", f"{number(n.service_bytes / of.services / GB)} GB",
         f"{cost.client_row} bytes of state an account; {of.operation_bytes:,g} bytes an operation, kept "
         f"{of.kept_days:g} days"),
        ("a service's database, statements", f"{number(n.service_statements / of.services)} /s",
         f"{by.cold.statements} a call without a lease, {by.leased.statements} with one, each alone in its passes"),
        ("a service's database, commits", f"{number(n.service_commits / of.services)} /s",
         f"{by.cold.commits} and {by.leased.commits} a call"),
        ("a service's database, connections", f"{2 * pool}",
         f"the dispatcher's 2 pools of {pool}, besides workers and web processes"),
        ("rebuild of a lost holder database", f"{number(hours)} h",
         f"{number(n.rebuild_reports)} reports of {of.retention_days:g} days, read at {of.read_mb:g} MB/s, then merged "
         f"at {number(holder_rate)} /s"),
    ]  # fmt: skip


HEAD = ("what", "needed", "from")


def measured_rates(runs: Iterable[Run]) -> tuple[float, float] | None:
    """Reports a second of one holder, and by its CPU time, of the newest run that measured them."""
    run = newest_of_each(runs).get("holder")
    if run is None:
        return None
    found = run.scenarios["holder"]
    rates = found.values("batches", "rate"), found.values("batches", "rate_by_its_cpu_time")
    return (median(rates[0]), median(rates[1])) if all(rates) else None


def measured(rates: tuple[float, float], page: str) -> Basis:
    """Those rates, with what is counted in the protocol and in the page."""
    steps = cost_table.read(page)
    cold, leased = (cost_table.total(steps, names) for names in (cost_table.COLD, cost_table.LEASED))
    return Basis(costs(), *rates, cold, leased)


def text(runs: Iterable[Run], page: str) -> str:
    """The default deployment for the page."""
    rates = measured_rates(runs)
    if rates is None:
        return f"{NOT_MEASURED.capitalize()}: it takes the scenario `holder`."
    return table(HEAD, lines(Deployment(), measured(rates, page)))


def main(words: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capacity", description=__doc__)
    for one in fields(Deployment):
        parser.add_argument(_option(one), type=type(one.default), default=one.default, help=_help(one), metavar="N")
    parser.add_argument(
        "--holder-rate", type=float, metavar="N", help="reports a second of a holder; default: measured"
    )
    arguments = vars(parser.parse_args(words))
    rate = arguments.pop("holder_rate")
    rates = (rate, rate) if rate else measured_rates(load_all())
    if rates is None:
        parser.error("no stored run has the scenario holder: run `make bench NAMES=holder`, or give --holder-rate")
    shown = Table(*HEAD)
    for line in lines(Deployment(**arguments), measured(rates, cost_table.PAGE.read_text())):
        shown.add_row(*line)
    Console().print(shown)
    return 0


def _option(one: Field[Any]) -> str:
    return f"--{one.name.replace('_', '-')}"


def _help(one: Field[Any]) -> str:
    return f"{one.metadata['help']} ({one.default:,g})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
