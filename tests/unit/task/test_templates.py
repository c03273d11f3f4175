"""Templates of accounts and groups, and what can be a key at all."""

from __future__ import annotations

import inspect
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_durable.errors import ConfigurationError, EnqueueError
from celery_durable.templates import KEY_BYTES_MAX, Template, check_key

KEYS = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1, max_size=KEY_BYTES_MAX // 4
)


def charge(tenant: Any, workflow: Any = "wf", /, amount: int = 0, *, region: str = "eu") -> None: ...


def anything(*args: Any, **kwargs: Any) -> None: ...


SIGNATURE = inspect.signature(charge)


def render(text: str, *args: Any, **kwargs: Any) -> str:
    bound = SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    return Template("charge: account", text, SIGNATURE).render(bound.arguments)


@given(KEYS)
def test_an_argument_becomes_the_account_as_it_is(tenant: str) -> None:
    """E5: every shape of text is an account of its own."""
    assert render("{tenant}", tenant) == tenant
    assert render("tenant:{tenant}/{workflow}", tenant) == f"tenant:{tenant}/wf"


@given(KEYS)
def test_a_text_without_fields_is_one_account(text: str) -> None:
    """E5: braces that are meant as such are doubled."""
    template = text.replace("{", "{{").replace("}", "}}")
    assert render(template, "x") == text


@given(KEYS, KEYS)
def test_accounts_are_the_same_only_if_their_texts_are(first: str, second: str) -> None:
    """E5: nothing is folded: case, spaces, normal forms."""
    assert (render("{tenant}", first) == render("{tenant}", second)) == (first == second)


@pytest.mark.parametrize(
    "key", ["1", "1:2", "é", "É", " a b ", "'\"`;--", "{}", "x" * KEY_BYTES_MAX, "🦜" * 256, "a\nb"]
)
def test_keys_of_every_shape(key: str) -> None:
    """E5"""
    assert check_key("account", key) == key


@pytest.mark.parametrize("key", ["", "a\0b", "\ud83d", "x" * (KEY_BYTES_MAX + 1), "é" * (KEY_BYTES_MAX // 2 + 1)])
def test_keys_that_nothing_can_keep_are_refused(key: str) -> None:
    """E5: empty is refused, and what SQL or an index could not hold."""
    with pytest.raises(EnqueueError, match="account = "):
        check_key("account", key)


@pytest.mark.parametrize("key", [1, None, True, b"a", ["a"], {"a"}, 1.5])
def test_keys_of_another_type_are_refused(key: Any) -> None:
    """E5"""
    with pytest.raises(EnqueueError, match=r"account = .*give a text"):
        check_key("account", key)


@pytest.mark.parametrize(
    ("text", "account"),
    [
        ("{tenant}", "acme"),
        ("{amount}", "7"),
        ("{amount:03d}", "007"),
        ("{tenant!r}", "'acme'"),
        ("{region}:{workflow}", "eu:wf"),
        ("{tenant.__class__.__name__}", "str"),
        ("{tenant[0]}", "a"),
    ],
)
def test_fields_are_bound_by_the_signature(text: str, account: str) -> None:
    assert render(text, "acme", amount=7) == account


def test_values_that_are_no_text() -> None:
    key = uuid.uuid4()
    assert render("{tenant}", key) == str(key)
    assert render("{tenant}", 5) == "5"


@pytest.mark.parametrize("value", [None, "", [], {}, (), b"x", set()])
def test_values_that_make_no_key_are_refused(value: Any) -> None:
    """E5: None would become the account "tenant:None", shared by all calls that lack a tenant."""
    with pytest.raises(EnqueueError, match=r"charge: account = 'tenant:\{tenant\}': tenant = "):
        render("tenant:{tenant}", value)


def test_a_field_that_the_call_lacks() -> None:
    template = Template("f: account", "{tenant}", inspect.signature(anything))
    assert template.render({"tenant": "a"}) == "a"
    with pytest.raises(EnqueueError, match=r"the call has no \{tenant\}"):
        template.render({})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tenant:{tennant}", "'tennant' is no argument of the task, did you mean 'tenant'"),
        ("{zzz}", "known are amount, region, tenant, workflow"),
        ("{0}", "must name an argument"),
        ("{}", "must name an argument"),
        ("{tenant", "not a template"),
        ("tenant}", "not a template"),
        ("{amount:{region}}", "a field inside a format"),
        ("", "it is empty"),
        ("a\0", "NUL"),
        ("{tenant!z}", "!z is no conversion"),
    ],
)
def test_wrong_templates_fail_where_they_are_declared(text: str, says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Template("charge: account", text, SIGNATURE)
    assert says in str(caught.value)
    assert str(caught.value).startswith("charge: account = ")
