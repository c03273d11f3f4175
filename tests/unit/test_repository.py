"""What must hold for the repository as a whole: what it ships, and what must never be in it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from docs.generate_settings import FILE, render

REPOSITORY = Path(__file__).resolve().parents[2]
LINES_MAX = 400
"""Of a module of the product; of any other file `LINES_MAX_ANYWHERE`."""
LINES_MAX_ANYWHERE = 700

# Written in parts, so that this file does not hold what it looks for.
_MACHINES = re.compile(r"(?<![\w.$}])/(?:" + "|".join(["wo" + "rk", "ro" + "ot", "ho" + "me", "Us" + "ers"]) + r")/\w")
_REGISTRIES = re.compile(
    "|".join(
        ["pypi" + r"\.org", "python" + "hosted", "repo" + r"[\w.]*\.maven", "--extra-" + "index", "--index" + "-url"]
    )
)
_SECRETS = re.compile("BEGIN [A-Z ]*PRIVATE" + " KEY")


def tracked() -> list[Path]:
    """The repository's own text files; without git, all that is not made. Pictures are none."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=False)
    if listed.returncode == 0:
        names = [name for name in listed.stdout.decode().split("\0") if name]
        return [REPOSITORY / name for name in names if (REPOSITORY / name).is_file() and not name.endswith(".png")]
    return [
        path
        for path in REPOSITORY.rglob("*")
        if path.is_file() and path.suffix != ".png" and not path.relative_to(REPOSITORY).parts[0].startswith(".")
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


def parsed(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    """Every tracked Python file of the folders (none: all), by its name."""
    for path in tracked():
        name = path.relative_to(REPOSITORY).as_posix()
        if path.suffix == ".py" and (not folders or name.startswith(folders)):
            yield name, ast.parse(path.read_text())


def test_every_module_says_what_it_is_for_and_none_is_endless() -> None:
    silent = [name for name, module in parsed() if module.body and not ast.get_docstring(module)]
    assert silent == []
    lines = {path.name: path.read_text().count("\n") for path in tracked() if path.suffix == ".py"}
    assert {name: count for name, count in lines.items() if count >= LINES_MAX_ANYWHERE} == {}


def test_what_others_call_has_a_docstring() -> None:
    """Public classes and functions of both packages; what a class overrides is told where it is declared."""
    silent = []
    for name, module in parsed("celery_durable/", "holder_service/"):
        for node in module.body:
            if (
                isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                and not node.name.startswith("_")
                and not ast.get_docstring(node)
                and not any(isinstance(by, ast.Name) and by.id == "overload" for by in node.decorator_list)
                and "migrations/versions/" not in name
            ):
                silent.append(f"{name}: {node.name}")
    assert silent == []


def test_no_test_asserts_how_fast_this_machine_is() -> None:
    """What a busy machine may take is no rule: `harness.within` fails as a missed deadline, and says what for."""
    timed = re.compile(r"assert [^\n]*(?:monotonic|perf_counter|time\.time)\(\) - \w+ <")
    found = []
    for path in tracked():
        if path.suffix == ".py" and path.relative_to(REPOSITORY).parts[0] == "tests":
            found += [f"{path.relative_to(REPOSITORY)}: {match[0]}" for match in timed.finditer(path.read_text())]
    assert found == []


def test_text_files_are_clean() -> None:
    unclean = []
    for path in tracked():
        content = path.read_bytes()
        if content and (not content.endswith(b"\n") or b"\r" in content or re.search(rb"[ \t]\n", content)):
            unclean.append(str(path.relative_to(REPOSITORY)))
        assert len(content) < 1_000_000, path
        assert path.suffix not in {".pyc", ".sqlite3", ".db", ".log", ".pid", ".whl"}, path
    assert [name for name in unclean if not name.startswith("tests/data/")] == []


def documents() -> list[Path]:
    """Everything that people read."""
    return [path for path in tracked() if path.suffix == ".md" and "data" not in path.parts]


def test_documents_name_only_files_and_targets_that_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, flags=re.MULTILINE))
    shown = set(re.findall(r"^([a-z][a-z-]*):.*##", makefile, flags=re.MULTILINE))
    assert targets == shown, "`make` lists every target"
    assert targets <= set(re.findall(r"[a-z-]+", makefile.partition(".PHONY:")[2].splitlines()[0]))
    missing = []
    for path in documents():
        text, name = path.read_text(), path.relative_to(REPOSITORY)
        missing += [
            f"{name}: make {target}"
            for target in re.findall(r"(?:`|^\s*|\$ )make ([a-z][a-z-]+)", text, flags=re.MULTILINE)
            if target not in targets
        ]
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if not link.startswith(("http:", "https:", "mailto:", "#")):
                file = path.parent / link.partition("#")[0]
                missing += [] if file.exists() else [f"{name}: {link}"]
    assert missing == []


def test_every_document_is_found_from_the_readme() -> None:
    reached, look = set(), [REPOSITORY / "README.md"]
    while look:
        path = look.pop()
        if path in reached:
            continue
        reached.add(path)
        for link in re.findall(r"\]\(([^)\s:#]+)[^)]*\)", path.read_text()):
            file = (path.parent / link).resolve()
            if file.suffix == ".md" and file.is_file():
                look.append(file)
    docs = {path for path in documents() if path.relative_to(REPOSITORY).parts[0] in ("docs", "topics")}
    assert sorted(str(path.relative_to(REPOSITORY)) for path in docs - reached) == []


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
