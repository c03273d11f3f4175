"""Where the time goes: ``python -m benchmarks.profile [--accounts 20 --task bench.limit5] [--calls 6000]``.

Runs celery-durable end to end under py-spy, and prints for each process its CPU time an operation and the functions
that held the interpreter, and for PostgreSQL the statements that an operation costs. A process that py-spy watches is a
little slower: rates come from ``python -m benchmarks``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
import psycopg

from benchmarks.report.stacks import sum_up
from benchmarks.setting.running import WARM_UP, complete
from benchmarks.setting.servers import Servers
from benchmarks.systems import durable

OWN = ("celery_durable/", "holder_service/")
RATE_HZ = 200
_SERVERS = {"postgres": "PostgreSQL", "redis-server": "Redis", "java": "Kafka"}


def main(words: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__)
    parser.add_argument("--task", default="bench.noop", help="bench.limit5 or bench.limit1 with --accounts")
    parser.add_argument("--accounts", type=int, default=0)
    parser.add_argument("--services", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=2, help="of each service's worker")
    parser.add_argument("--pool", default="prefork")
    parser.add_argument("--callers", type=int, default=1, help="processes that call each service")
    parser.add_argument("--calls", type=int, default=6_000)
    parser.add_argument("--unwatched", action="store_true", help="without py-spy: CPU times and statements only")
    parser.add_argument("--top", type=int, default=12, help="functions to show")
    arguments = parser.parse_args(words)
    with ExitStack() as handles:
        folder = Path(handles.enter_context(tempfile.TemporaryDirectory(prefix="celery-durable-bench-")))
        servers = Servers(handles, {"shared_preload_libraries": "pg_stat_statements"})
        statements = handles.enter_context(psycopg.connect(servers.postgresql.replace("+psycopg", ""), autocommit=True))
        statements.execute("CREATE EXTENSION pg_stat_statements")
        running = handles.enter_context(
            durable.running(
                servers,
                services=arguments.services,
                concurrency=arguments.concurrency,
                pool=arguments.pool,
                callers=arguments.callers,
                task=arguments.task,
                accounts=arguments.accounts,
            )
        )
        complete(running, WARM_UP)
        watched = {
            process.label: _watch(process.pid, folder / process.label)
            for process in ([] if arguments.unwatched else running.processes)
        }
        before, senders = _cpu_s(running), _reaped_s()
        statements.execute("SELECT pg_stat_statements_reset()")
        answers, finished_ns = complete(running, arguments.calls)
        after = _cpu_s(running)
        print(
            f"{arguments.calls / (finished_ns - min(one['began_ns'] for one in answers)) * 1e9:.0f} operations a second"
        )
        after["sender"], before["sender"] = _reaped_s(), senders
        for label, spent_s in sorted(after.items()):
            print(f"{label:<24} {(spent_s - before[label]) / arguments.calls * 1e6:7.0f} µs of CPU time an operation")
        _print_statements(statements, arguments.calls, arguments.top)
        for label, spy in watched.items():
            spy.send_signal(signal.SIGINT)  # it writes what it has
            spy.wait(30)
            _print(label, folder / label, arguments.top)
    return 0


def _watch(pid: int, output: Path) -> subprocess.Popen[bytes]:
    spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") or "py-spy"
    words = [
        "record",
        "--pid",
        str(pid),
        "--subprocesses",
        "--format",
        "raw",
        "--function",
        "--gil",
        "--rate",
        str(RATE_HZ),
    ]
    return subprocess.Popen(
        [spy, *words, "--duration", "600", "--output", str(output)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _cpu_s(running: durable.Durable) -> defaultdict[str, float]:
    """CPU time of every process under this one, by what it is."""
    labels = {process.pid: process.label for process in running.processes}
    spent: defaultdict[str, float] = defaultdict(float)
    for child in psutil.Process().children():
        label = labels.get(child.pid) or _SERVERS.get(child.name())
        if label is not None:
            for process in (child, *child.children(recursive=True)):
                spent[label if process is child else f"{label}, children"] += sum(process.cpu_times()[:4])
    return spent


def _reaped_s() -> float:
    """CPU time of children that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def _print_statements(connection: psycopg.Connection, calls: int, top: int) -> None:
    """What all databases of the server executed, and how much log that wrote."""
    query = (
        "SELECT query, calls, rows, total_exec_time, wal_bytes FROM pg_stat_statements "
        "WHERE query NOT LIKE '%pg_stat_statements%' ORDER BY calls DESC"
    )
    found = connection.execute(query).fetchall()
    total, log_bytes = sum(row[1] for row in found), sum(row[4] for row in found)
    print(f"\nPostgreSQL: {total / calls:.2f} statements and {log_bytes / calls:.0f} bytes of log an operation")
    for text, count, rows, spent_ms, _ in found[: 2 * top]:
        words = " ".join(text.split())
        print(
            f"  {count / calls:6.3f} an operation, {rows / count:5.1f} rows, {spent_ms / count:6.3f} ms  {words:.110}"
        )


def _print(label: str, output: Path, top: int) -> None:
    if not output.exists():
        print(f"\n{label}: py-spy saw nothing")
        return
    shares = sum_up(output.read_text().splitlines())
    print(f"\n{label}: {shares.total} samples")
    for name, share in shares.top(shares.itself, top):
        print(f"  itself {share:6.1%}  {name}")
    for own in OWN:
        for name, share in shares.top(shares.within, top, own):
            print(f"  within {share:6.1%}  {name}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
