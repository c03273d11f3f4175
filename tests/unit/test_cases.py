"""The list of cases in tests/cases.md against the tests themselves: nothing in it is without a test that states it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
LIST = REPOSITORY / "tests" / "cases.md"
NUMBERS = {"A": 43, "B": 13, "C": 26}
"""How many cases each section of the list has."""

REAL_MARKERS = frozenset({"postgresql", "kafka", "redis", "processes"})
REAL_FIXTURES = frozenset({"postgresql_server", "redis_server", "kafka_server"})
"""Servers of the whole run; those of a test's own are called ``own_…``."""

_CASE = re.compile(r"^- ([A-Z])([0-9]+)( ◆)?: (\S.*?)((?: `[^`]+::[^`]+`)*)$")


@dataclass(frozen=True)
class Case:
    """One line of the list."""

    name: str
    real: bool
    """A diamond: only real processes or services show it."""
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Stated:
    """One test function, as its source says."""

    docstring: str
    real: bool
    """It has a real process or a real service."""


def read_cases(text: str) -> dict[str, Case]:
    """The list's cases by name. A line that begins like a case and is none raises."""
    cases: dict[str, Case] = {}
    for line in text.splitlines():
        if not line.startswith("- "):
            continue
        match = _CASE.match(line)
        if match is None:
            raise ValueError(f"no case: {line}")
        letter, number, diamond, _words, tests = match.groups()
        name = letter + number
        if name in cases:
            raise ValueError(f"{name} is there twice")
        cases[name] = Case(name, diamond is not None, tuple(re.findall(r"`([^`]+)`", tests)))
    return cases


@cache
def _module(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _functions(path: Path) -> Iterator[ast.FunctionDef]:
    return (node for node in _module(path).body if isinstance(node, ast.FunctionDef))


def _markers(nodes: Sequence[ast.AST]) -> set[str]:
    """The names in ``pytest.mark.NAME`` anywhere below the nodes."""
    return {
        found.attr
        for node in nodes
        for found in ast.walk(node)
        if isinstance(found, ast.Attribute) and isinstance(found.value, ast.Attribute) and found.value.attr == "mark"
    }


@cache
def _fixtures(path: Path) -> dict[str, ast.FunctionDef]:
    """The fixtures that a test of the file sees: its own, then those of conftest.py from its folder upwards."""
    found: dict[str, ast.FunctionDef] = {}
    folders = [folder / "conftest.py" for folder in path.parents if folder.is_relative_to(REPOSITORY / "tests")]
    for file in (path, *folders):
        for function in _functions(file) if file.is_file() else ():
            if any("fixture" in ast.dump(decorator) for decorator in function.decorator_list):
                found.setdefault(function.name, function)
    return found


def _asks_for(function: ast.FunctionDef) -> set[str]:
    """The fixtures that it names: by arguments, or as text for ``request.getfixturevalue``."""
    asked = {argument.arg for argument in function.args.args}
    texts = {
        node.value for node in ast.walk(function) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return asked | (texts if "request" in asked else set())


def _is_real(path: Path, function: ast.FunctionDef) -> bool:
    fixtures, seen, left = _fixtures(path), set[str](), [function]
    while left:
        each = left.pop()
        if _markers(each.decorator_list) & REAL_MARKERS:
            return True
        asked = _asks_for(each)
        if asked & REAL_FIXTURES or any(name.startswith("own_") for name in asked):
            return True
        left += [fixtures[name] for name in asked - seen if name in fixtures]
        seen |= asked
    assignments = [node for node in _module(path).body if isinstance(node, ast.Assign)]
    return bool(_markers(assignments) & REAL_MARKERS)


def find_test(node_id: str) -> Stated | None:
    """The test that ``path::name`` names; None: there is none."""
    name = node_id.rpartition("::")[2]
    path = REPOSITORY / node_id.partition("::")[0]
    if not path.is_file() or not name.startswith("test_"):
        return None
    for function in _functions(path):
        if function.name == name:
            return Stated(ast.get_docstring(function) or "", _is_real(path, function))
    return None


def faults_of(case: Case) -> list[str]:
    """What is wrong with a case's line."""
    if not case.tests:
        return [f"{case.name} has no test"]
    tests = {node_id: find_test(node_id) for node_id in case.tests}
    faults = [f"{case.name}: {node_id} does not exist" for node_id, test in tests.items() if test is None]
    found = {node_id: test for node_id, test in tests.items() if test is not None}
    faults += [
        f"{case.name}: the docstring of {node_id} does not name it"
        for node_id, test in found.items()
        if not re.search(rf"\b{case.name}\b", test.docstring)
    ]
    if case.real and not any(test.real for test in found.values()):
        faults.append(f"{case.name} ◆: none of its tests has a real process or service")
    return faults


def test_the_list_is_complete() -> None:
    """Every number of every section, once and in order."""
    names = list(read_cases(LIST.read_text()))
    assert names == [f"{letter}{number}" for letter, most in NUMBERS.items() for number in range(1, most + 1)]


@pytest.mark.parametrize("case", read_cases(LIST.read_text()).values(), ids=lambda case: case.name)
def test_every_case_has_a_test_that_states_it(case: Case) -> None:
    assert faults_of(case) == []


def test_faults_of_the_list_are_found() -> None:
    """Each fault that this module is here for, on lines made for it."""
    real = "tests/e2e/test_protocol.py::test_old_replies_give_nothing"
    pure = "tests/simulation/test_directed.py::test_silence_frees_nothing"
    lines = {
        "- A1: words": ["A1 has no test"],
        "- A2: words `tests/e2e/test_protocol.py::test_that_never_was`": [
            "A2: tests/e2e/test_protocol.py::test_that_never_was does not exist"
        ],
        f"- A9: words `{real}`": [f"A9: the docstring of {real} does not name it"],
        f"- A14 ◆: words `{pure}`": ["A14 ◆: none of its tests has a real process or service"],
        f"- A14: words `{pure}`": [],
        f"- A21 ◆: words `{real}`": [],
    }
    for line, faults in lines.items():
        (case,) = read_cases(line).values()
        assert faults_of(case) == faults
    for text in ("- a line that is no case", "- A1: one\n- A1: one again"):
        with pytest.raises(ValueError, match=r"no case|twice"):
            read_cases(text)


@pytest.mark.parametrize(
    ("node_id", "real"),
    [
        ("tests/integration/test_passes_concurrency.py::test_who_holds_an_operation_stalls_no_account", True),
        ("tests/integration/test_holder_process.py::test_the_commands_of_an_operator", True),
        ("tests/integration/test_holder_service.py::test_two_clients_that_race_for_the_last_permit", True),
        ("tests/unit/store/test_database.py::test_no_password_is_shown", False),
    ],
)
def test_what_is_real_follows_markers_and_fixtures(node_id: str, real: bool) -> None:
    found = find_test(node_id)
    assert found is not None
    assert found.real is real
