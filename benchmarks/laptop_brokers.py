"""Which Celery broker serves a laptop without a server? The figures of docs/architecture.md.

``python -m benchmarks.laptop_brokers [filesystem] [sqlalchemy] [spool]``: for each transport in turn a real prefork
worker of two processes, tasks that do nothing, each queue looked at every 50 ms where that can be said. Prints one
line a transport: latency, throughput, idle CPU, memory, and how many large messages arrived.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from celery import Celery

from celery_durable import spool

TRANSPORTS = ("filesystem", "sqlalchemy", "spool")
POLL_S = 0.05
SINGLES, BURST, LARGE, LARGE_BYTES, SENDERS = 60, 1_000, 800, 200_000, 2
IDLE_S, ARRIVAL_S = 8, 30


def make_app(transport: str, folder: Path) -> Celery:
    """An app on the transport, with one task that writes down its number and how long it was under way."""
    options: dict[str, object] = {}
    if transport == "filesystem":
        for name in ("queue", "control"):
            (folder / name).mkdir(exist_ok=True)
        broker = "filesystem://"
        options = {
            "data_folder_in": str(folder / "queue"),
            "data_folder_out": str(folder / "queue"),
            "control_folder": str(folder / "control"),
            "polling_interval": POLL_S,
        }
    elif transport == "sqlalchemy":
        broker = f"sqla+sqlite:///{folder}/broker.sqlite3"
    else:
        spool.register()
        broker = spool.url(folder / "spool")
    app = Celery("laptop_brokers", broker=broker, broker_transport_options=options)
    app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=True)

    @app.task(name="mark", shared=False)
    def mark(number: int, sent_at: float) -> None:
        with (folder / "done").open("ab", buffering=0) as done:
            done.write(f"{number} {time.time() - sent_at:.6f}\n".encode())

    return app


def serve(transport: str, folder: Path) -> None:
    """Runs the worker, in a process of its own."""
    quiet = ["--without-mingle", "--without-gossip", "--without-heartbeat"]
    make_app(transport, folder).worker_main(["worker", "-c", "2", "-l", "WARNING", *quiet])


def send_large(transport: str, folder: Path) -> None:
    """Sends its share of the large messages, in a process of its own."""
    mark = make_app(transport, folder).tasks["mark"]
    for number in range(LARGE // SENDERS):
        mark.apply_async((number, time.time()), headers={"ballast": "x" * LARGE_BYTES})


def done(folder: Path) -> list[float]:
    """Seconds that each finished message was under way, in the order of their ends."""
    return [float(line.split()[1]) for line in (folder / "done").read_text().splitlines()]


def wait_for(condition: Callable[[], bool], deadline_s: float) -> bool:
    """Whether the condition came true in time."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@contextmanager
def child(*arguments: str) -> Iterator[psutil.Popen]:
    """One of this module's roles as a process, ended with its children."""
    with psutil.Popen(
        [sys.executable, "-m", __spec__.name, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    ) as process:
        try:
            yield process
        finally:
            if process.is_running():
                for each in [*process.children(recursive=True), process]:
                    each.kill()


def cpu_s(processes: list[psutil.Process]) -> float:
    """User and system time of the processes."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measure(transport: str, folder: Path) -> str:
    """One transport's line."""
    (folder / "done").touch()
    mark = make_app(transport, folder).tasks["mark"]
    with child("serve", transport, str(folder)) as worker:
        mark.delay(0, time.time())
        wait_for(lambda: len(done(folder)) == 1, ARRIVAL_S)
        for number in range(SINGLES):
            mark.delay(number, time.time())
            wait_for(lambda: len(done(folder)) == number + 2, ARRIVAL_S)  # noqa: B023 - called at once
        latencies_ms = sorted(1_000 * each for each in done(folder)[1:])
        family = [worker, *worker.children(recursive=True)]
        before = cpu_s(family)
        time.sleep(IDLE_S)
        idle = (cpu_s(family) - before) / IDLE_S
        megabytes = worker.memory_info().rss / 1e6
        start, arrived = time.monotonic(), len(done(folder))
        for number in range(BURST):
            mark.delay(number, time.time())
        sent_s = time.monotonic() - start
        wait_for(lambda: len(done(folder)) - arrived >= BURST, 3 * ARRIVAL_S)
        run_s = time.monotonic() - start
        arrived = len(done(folder))
        with child("large", transport, str(folder)) as first, child("large", transport, str(folder)) as second:
            first.wait()
            second.wait()
        wait_for(lambda: len(done(folder)) - arrived >= LARGE or not worker.is_running(), ARRIVAL_S)
        large = len(done(folder)) - arrived
        alive = "lives" if worker.poll() is None else f"DEAD ({worker.returncode})"
    return (
        f"{transport:<11} latency p50 {latencies_ms[len(latencies_ms) // 2]:.0f} ms, "
        f"p95 {latencies_ms[len(latencies_ms) * 95 // 100]:.0f} ms; sent {BURST / sent_s:.0f}/s, "
        f"sent and run {BURST / run_s:.0f}/s; idle {idle:.2%} of a core; {megabytes:.0f} MB; "
        f"{large} of {LARGE} messages of {LARGE_BYTES // 1000} kB arrived, worker {alive}"
    )


def main() -> None:
    """Measures the transports named, or all."""
    roles: dict[str, Callable[[str, Path], None]] = {"serve": serve, "large": send_large}
    if sys.argv[1:2] and sys.argv[1] in roles:
        roles[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
        return
    print(f"load average at start {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    for transport in sys.argv[1:] or TRANSPORTS:
        with tempfile.TemporaryDirectory() as folder:
            print(measure(transport, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
