"""What must hold for the repository as a whole: what it ships, and what must never be in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from docs.generate_settings import FILE, render

REPOSITORY = Path(__file__).resolve().parents[2]
LINES_MAX = 400

# Written in parts, so that this file does not hold what it looks for.
_MACHINES = re.compile(r"(?<![\w.$}])/(?:" + "|".join(["wo" + "rk", "ro" + "ot", "ho" + "me", "Us" + "ers"]) + r")/\w")
_REGISTRIES = re.compile(
    "|".join(
        ["pypi" + r"\.org", "python" + "hosted", "repo" + r"[\w.]*\.maven", "--extra-" + "index", "--index" + "-url"]
    )
)
_SECRETS = re.compile("BEGIN [A-Z ]*PRIVATE" + " KEY")


def tracked() -> list[Path]:
    """The repository's own text files; without git, all that is not made."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=False)
    if listed.returncode == 0:
        names = [name for name in listed.stdout.decode().split("\0") if name]
        return [REPOSITORY / name for name in names if (REPOSITORY / name).is_file()]
    return [
        path
        for path in REPOSITORY.rglob("*")
        if path.is_file() and not path.relative_to(REPOSITORY).parts[0].startswith(".")
    ]


def test_no_file_names_a_machine_a_registry_or_a_secret() -> None:
    found = []
    for path in tracked():
        if path.parent == REPOSITORY / "tests" / "data":
            continue  # others' data, as it is
        text = path.read_text(errors="replace")
        for pattern in (_MACHINES, _REGISTRIES, _SECRETS):
            found += [f"{path.relative_to(REPOSITORY)}: {match[0]}" for match in pattern.finditer(text)]
    assert found == []


def test_modules_stay_small() -> None:
    long = {}
    for package in ("celery_durable", "holder_service", "docs", "examples"):
        for path in (REPOSITORY / package).rglob("*.py"):
            lines = path.read_text().count("\n")
            if lines > LINES_MAX and "versions" not in path.parts:
                long[str(path.relative_to(REPOSITORY))] = lines
    assert long == {}


def test_no_stub_is_left() -> None:
    left = []
    words = re.compile("TO" + "DO|FIX" + "ME|XX" + "X|raise NotImplemented" + "Error")
    for package in ("celery_durable", "holder_service", "docs", "examples", "compose"):
        for path in (REPOSITORY / package).rglob("*.py"):
            left += [f"{path.relative_to(REPOSITORY)}: {match[0]}" for match in words.finditer(path.read_text())]
    assert left == []


def test_constraints_are_plain_pins_of_all_that_is_declared() -> None:
    lines = [line for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line) for line in lines)
    pinned = {canonicalize_name(line.partition("==")[0]) for line in lines}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    declared = [
        *project["project"]["dependencies"],
        *chain.from_iterable(project["project"]["optional-dependencies"].values()),
        *chain.from_iterable(project["dependency-groups"].values()),
    ]
    assert {canonicalize_name(Requirement(each).name) for each in declared} <= pinned


def test_the_settings_page_is_not_stale() -> None:
    assert FILE.read_text() == render(), "run: make docs-settings"


def test_ci_and_make_have_what_the_readers_of_the_repository_run() -> None:
    assert os.access(REPOSITORY / ".ci" / "run", os.X_OK)
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in ("demo", "test", "test-fast", "lint", "schemas", "docs-settings", "sim", "clean"):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    for line in (REPOSITORY / "constraints.txt", REPOSITORY / "LICENSE", REPOSITORY / "CHANGELOG.md"):
        assert line.stat().st_size > 500


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names of the files in the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        return set(archive.namelist())


def test_the_wheel_carries_types_migrations_topics_and_the_licence(wheel: set[str]) -> None:
    assert {"celery_durable/py.typed", "holder_service/py.typed"} <= wheel
    for package in ("celery_durable/store", "holder_service"):
        assert f"{package}/migrations/versions/v0001_first_tables.py" in wheel
    topics = [path for path in (REPOSITORY / "topics").rglob("*") if path.is_file()]
    assert {path.suffix for path in topics} == {".yaml", ".json", ".md"}
    names = {path.relative_to(REPOSITORY / "topics").as_posix() for path in topics}
    assert {f"celery_durable/_topics/{name}" for name in names} <= wheel
    assert {"schemas/AccountReport.json", "vectors/client-first-operation.json", "protocol.md"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in wheel)
    assert not any(name.startswith(("tests/", "docs/", "examples/")) for name in wheel)
