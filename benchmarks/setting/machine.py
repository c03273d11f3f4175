"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.report.figures import median
from tests.harness import REPOSITORY
from tests.services.kafka import VERSION as KAFKA_VERSION

PACKAGES = ("celery", "kombu", "redis", "sqlalchemy", "psycopg", "confluent-kafka", "dbos", "procrastinate")


def describe() -> dict[str, str]:
    """The machine, its software, and how busy it was."""
    return {
        "processor": f"{os.cpu_count()} x {_processor()}",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "servers": f"{_postgresql()}, {_first_line('redis-server', '--version')}, Apache Kafka {KAFKA_VERSION}",
        "packages": ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
        "one fdatasync": f"{_fdatasync_ms():.2f} ms (median of 50, 8 kB each, in a file that is there)",
        "load average at start": f"{os.getloadavg()[0]:.2f}",
    }


def commit() -> str:
    """The commit that is measured; with ``+`` if production code differs from it."""
    head = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--", "celery_durable", "holder_service")
    return f"{head[:7]}+" if changed else head[:7]


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _postgresql() -> str:
    found = shutil.which("postgres") or next(
        (str(path) for path in sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), reverse=True)), "postgres"
    )
    return _first_line(found, "--version").replace("postgres (PostgreSQL)", "PostgreSQL")


def _first_line(*command: str) -> str:
    return " ".join(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[:3])


def _fdatasync_ms() -> float:
    times, block = [], b"x" * 8192
    with tempfile.NamedTemporaryFile(buffering=0) as file:
        file.write(50 * block)
        os.fsync(file.fileno())
        file.seek(0)
        for _ in range(50):
            began = time.perf_counter()
            file.write(block)
            os.fdatasync(file.fileno())
            times.append((time.perf_counter() - began) * 1000)
    return median(times)
