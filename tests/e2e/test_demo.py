"""The demo itself, shortened: everything it checks holds, and no process grows beyond 150 MB."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from examples.api_calls.generate_jobs import generate
from examples.api_calls.jobs import LIMITS, SERVICES, WORKFLOW_LIMITS, load
from tests.harness import REPOSITORY

JOBS = 60
RESIDENT_MAX_MB = 150


def test_the_job_file_is_what_its_generator_makes() -> None:
    jobs = load()
    assert jobs == generate()
    assert {job.tenant for job in jobs} == set(LIMITS)
    assert {job.service for job in jobs} == set(SERVICES)
    assert {(job.tenant, job.workflow) for job in jobs if job.workflow} == set(WORKFLOW_LIMITS)


@pytest.mark.processes
def test_demo(tmp_path: Path) -> None:
    """G3 in small: a killed worker and a restarted holder, and by the API's own count nothing was above its limit."""
    log = tmp_path / "demo.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "examples.api_calls", "--jobs", str(JOBS), "--seconds", "120"],
            cwd=REPOSITORY,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    resident: dict[str, float] = {}
    family: set[psutil.Process] = set()
    try:
        deadline = time.monotonic() + 240
        while process.poll() is None:
            assert time.monotonic() < deadline, log.read_text()
            _measure(psutil.Process(process.pid), resident, family)
            time.sleep(0.5)
    finally:
        process.kill()
    text = log.read_text()
    assert process.returncode == 0, text
    assert f"{JOBS} of {JOBS} jobs succeeded" in text
    assert "killed the worker of billing" in text
    assert "restarted the holder" in text
    assert "\x1b" not in text  # plain lines in a pipe
    assert not {name: mb for name, mb in resident.items() if mb > RESIDENT_MAX_MB}
    assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert not list(tmp_path.glob("celery-durable-demo-*"))


def _measure(parent: psutil.Process, resident: dict[str, float], family: set[psutil.Process]) -> None:
    try:
        processes = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        family.add(process)
        try:
            name = " ".join(process.cmdline()[1:])
            resident[name] = max(resident.get(name, 0.0), process.memory_info().rss / 2**20)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
