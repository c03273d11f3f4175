"""Results and exceptions as rows keep them."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from celery.utils.serialization import UnpickleableExceptionWrapper
from hypothesis import given
from hypothesis import strategies as st
from kombu.exceptions import ContentDisallowed, EncodeError

from celery_durable.outcomes import bound_text, decode_result, encode_exception, encode_result, error_text

BYTES_MAX = 2_000


class Hostile(Exception):
    """Cannot be pickled, and has no text."""

    def __init__(self, first: object, second: object) -> None:
        super().__init__(first)
        self.hook = lambda: second

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    __str__ = __repr__


def app_with(serializer: str, **conf: Any) -> Celery:
    app = Celery("x", set_as_current=False)
    app.conf.update(result_serializer=serializer, result_accept_content=[serializer], **conf)
    return app


@pytest.fixture(params=["json", "pickle", "yaml"])
def app(request: pytest.FixtureRequest) -> Celery:
    return app_with(request.param)


@pytest.mark.parametrize("value", [None, 0, "é", [1, {"a": None}], {"x": "y" * 100_000}])
def test_results_come_back(app: Celery, value: Any) -> None:
    assert decode_result(app, encode_result(app, value, "t"), failed=False) == value


def test_results_are_compressed_as_the_app_says() -> None:
    app = app_with("json", result_compression="gzip")
    encoded = encode_result(app, "x" * 10_000, "t")
    assert len(encoded.data) < 1_000
    assert decode_result(app, encoded, failed=False) == "x" * 10_000


def test_a_result_that_cannot_be_serialised() -> None:
    """C10"""
    says = r"shop\.charge: its result, of type object, .*result_serializer = 'json'.*ignore_result=True"
    with pytest.raises(EncodeError, match=says):
        encode_result(app_with("json"), object(), "shop.charge")


def test_content_that_the_app_does_not_accept() -> None:
    encoded = encode_result(app_with("pickle"), 1, "t")
    with pytest.raises(ContentDisallowed):
        decode_result(app_with("json"), encoded, failed=False)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x" * 5_000_000),
        ValueError("é\udc00\0" * 100_000, 3, object()),
        ValueError(*range(10_000)),
        OSError(2, "no such file"),
        KeyError(object()),
        Hostile(1, 2),
        SystemExit(3),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_exception_is_kept_bounded(app: Celery, error: BaseException) -> None:
    """C10: an exception that cannot be pickled, one with a message of 5 MB: terminal, clear, bounded."""
    encoded = encode_exception(app, error, bytes_max=BYTES_MAX)
    assert len(encoded.data) <= BYTES_MAX
    found = decode_result(app, encoded, failed=True)
    assert isinstance(found, BaseException)
    if not isinstance(error, Hostile):
        assert type(found).__name__ == type(error).__name__
    text = error_text(error, bytes_max=100)
    assert type(error).__name__ in text
    assert len(text.encode()) <= 100


def test_the_real_name_of_an_exception_that_a_child_had_to_wrap(app: Celery) -> None:
    """C10"""
    wrapped = UnpickleableExceptionWrapper("billing", "CardRefused", ["no money"], "CardRefused('no money')")
    found = decode_result(app, encode_exception(app, wrapped, bytes_max=BYTES_MAX), failed=True)
    assert type(found).__name__ == "CardRefused"
    assert found.args == ("no money",)
    assert error_text(wrapped, bytes_max=100) == "CardRefused: CardRefused('no money')"


@given(st.text(st.characters()), st.integers(1, 200))
def test_bounded_texts_fit_every_database(text: str, bytes_max: int) -> None:
    """No NUL, no half pair, never longer than asked; what fits is kept."""
    bounded = bound_text(text, bytes_max=bytes_max)
    assert len(bounded.encode()) <= bytes_max
    assert "\0" not in bounded
    if len(text.encode("utf-8", "backslashreplace").replace(b"\0", b"\xef\xbf\xbd")) <= bytes_max:
        assert bounded == text.replace("\0", "\ufffd").encode("utf-8", "backslashreplace").decode()
