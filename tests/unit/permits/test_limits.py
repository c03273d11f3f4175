"""Which limit is in force (design, section 10)."""

import pytest

from celery_durable.permits.limits import account_limit, group_limit, merge_declared
from celery_durable.permits.messages import Declared, Rate

RULES = {"tenant:acme": 7, "tenant": 5, "*": 3}


@pytest.mark.parametrize(
    ("account", "commanded", "rules", "declared", "limit", "source"),
    [
        ("tenant:acme", 9, RULES, [2], 9, "command"),
        ("tenant:acme", 0, RULES, [2], 0, "command"),
        ("tenant:acme", None, RULES, [2], 7, "rule tenant:acme"),
        ("tenant:b", None, RULES, [2], 5, "rule tenant"),
        ("tenant", None, RULES, [2], 5, "rule tenant"),
        ("other:b", None, RULES, [2], 3, "rule *"),
        ("other", None, {}, [4, None, 2], 2, "declared"),
        ("other", None, {}, [None], 1, "default"),
        ("other", None, {}, [], 1, "default"),
    ],
)
def test_the_order_of_what_sets_a_limit(account, commanded, rules, declared, limit, source):
    """E1, E2: command, then rules by whole account, name and ``*``, then the smallest declared, then 1."""
    found = account_limit(account, commanded, rules, [Declared(limit=each) for each in declared])
    assert (found.limit, found.source, found.warning) == (limit, source, None)


@pytest.mark.parametrize(("commanded", "rules", "named"), [(4, {}, "command"), (None, {"*": 9}, "rule *")])
def test_nothing_loosens_a_mutex(commanded, rules, named):
    """E1: a rule or a command above 1 is ignored, with a warning that names both."""
    found = account_limit("m", commanded, rules, [Declared(mutex=True), Declared(limit=3)])
    assert (found.limit, found.source) == (1, "mutex")
    assert found.warning is not None
    assert "mutex" in found.warning
    assert named in found.warning


def test_a_mutex_may_be_stopped_and_needs_no_warning_of_a_declaration():
    assert account_limit("m", 0, {}, [Declared(mutex=True)]).limit == 0
    found = account_limit("m", None, {}, [Declared(mutex=True, limit=5)])
    assert (found.limit, found.source, found.warning) == (1, "mutex", None)


def test_a_groups_limit():
    declared = [Declared(group_limit=4), Declared(group_limit=3), Declared()]
    assert group_limit("t:a", "g", {"g": 9}, {"t": 2}, declared) == 9
    assert group_limit("t:a", "h", {"g": 9}, {"t": 2}, declared) == 2
    assert group_limit("t:a", "h", {"g": 9}, {}, declared) == 3
    assert group_limit("t:a", "h", {}, {}, []) is None


def test_operations_without_a_group_are_held_by_no_group_limit():
    declared = [Declared(group_limit=2)]
    assert group_limit("t:a", "", {"g": 9}, {"*": 2}, declared) is None
    assert group_limit("t:a", "", {"": 1}, {"*": 2}, declared) == 1


def test_merged_declarations_are_the_smallest():
    slow, fast = Rate(tokens=1, per_ms=1000, burst=1), Rate(tokens=5, per_ms=1000, burst=1)
    merged = merge_declared(Declared(limit=5, mutex=True, rate=fast), Declared(limit=3, group_limit=2, rate=slow))
    assert merged == Declared(limit=3, group_limit=2, mutex=True, rate=slow)
    assert merge_declared(None, None) == Declared()
    assert merge_declared(None, merged) == merge_declared(merged, None) == merge_declared(merged, merged) == merged
