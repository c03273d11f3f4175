"""Templates of accounts and groups: ``"tenant:{tenant}"`` over the call's own arguments, checked at decoration."""

from __future__ import annotations

import string
from collections.abc import Mapping
from inspect import Parameter, Signature
from typing import Any

from celery_durable.errors import ConfigurationError, EnqueueError
from celery_durable.names import nearest

KEY_BYTES_MAX = 1024
"""Longest account or group, in bytes of UTF-8: the two together must fit PostgreSQL's longest index entry (2,704)."""

_FORMATTER = string.Formatter()
_NO_KEYS = (dict, list, tuple, set, frozenset, bytes, bytearray)


class Template:
    """A text with ``{argument}`` fields. Without a field it is one account (or group) for all calls.

    A field is the name of an argument of the task, maybe with ``.attribute``, ``[key]``, ``!conversion`` and
    ``:format`` as in :meth:`str.format`.

    :param where: names task and option in errors, ``"charge: account"``.
    :raises ConfigurationError: the text is empty or no template, or a field is no argument of the task.
    """

    def __init__(self, where: str, text: str, signature: Signature) -> None:
        self.where = where
        self.text = text
        self._fields: list[str] = []
        try:
            parts = list(_FORMATTER.parse(text))
            nested = [spec for _, _, spec, _ in parts if spec and "{" in spec]
        except ValueError as error:
            raise ConfigurationError(
                f"{where} = {text!r:.200}: not a template ({error}); write {{{{ and }}}} for braces meant as such"
            ) from None
        for spec in nested:
            raise ConfigurationError(f"{where} = {text!r:.200}: a field inside a format ({spec!r}) is not supported")
        arguments = signature.parameters
        takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in arguments.values())
        for _, field, _, conversion in parts:
            if field is None:
                continue
            if conversion not in {None, "r", "s", "a"}:
                raise ConfigurationError(f"{where} = {text!r:.200}: !{conversion} is no conversion; use !r, !s or !a")
            name = _first(field)
            if not name or name.isdigit():
                raise ConfigurationError(
                    f"{where} = {text!r:.200}: the field {{{field}}} must name an argument of the task"
                )
            if name not in arguments and not takes_any:
                raise ConfigurationError(
                    f"{where} = {text!r:.200}: {name!r} is no argument of the task{nearest(name, list(arguments))}"
                )
            self._fields.append(field)
        if not self._fields:
            check_key(where, self.text, ConfigurationError)

    def render(self, arguments: Mapping[str, Any]) -> str:
        """The account or group of a call.

        :param arguments: of the call, by name, defaults included, what ``**kwargs`` took at the top level.
        :raises EnqueueError: a field has no value, or one that makes no key (None, empty, a collection).
        """
        for field in self._fields:
            try:
                value, _ = _FORMATTER.get_field(field, (), arguments)
            except (KeyError, AttributeError, IndexError, TypeError) as error:
                raise EnqueueError(
                    f"{self.where} = {self.text!r}: the call has no {{{field}}} ({type(error).__name__}: {error})"
                ) from None
            if value is None or isinstance(value, _NO_KEYS) or value == "":
                raise EnqueueError(
                    f"{self.where} = {self.text!r}: {field} = {value!r:.100}: give a text or a number that is not empty"
                )
        try:
            key = _FORMATTER.vformat(self.text, (), arguments)
        except (ValueError, TypeError) as error:
            raise EnqueueError(f"{self.where} = {self.text!r}: {error}") from None
        return check_key(self.where, key)


def check_key(where: str, value: Any, error: type[Exception] = EnqueueError) -> str:
    """The value, if it can be an account or a group: a text, not empty, that SQL and Kafka keep as it is (case E5)."""
    if not isinstance(value, str):
        raise error(f"{where} = {value!r:.100}: it is of type {type(value).__name__}; give a text")
    if not value:
        raise error(f"{where} = '': it is empty; give a text with at least one character")
    try:
        length = len(value.encode())
    except UnicodeEncodeError:
        length = 0
    if not length or "\0" in value:
        raise error(f"{where} = {value!r:.100}: it holds a NUL or half a surrogate pair, which no database keeps")
    if length > KEY_BYTES_MAX:
        raise error(f"{where} = {value[:60]!r}…: it has {length} bytes in UTF-8; give at most {KEY_BYTES_MAX}")
    return str(value)


def _first(field: str) -> str:
    """The argument's name in ``argument.attribute[key]``."""
    for position, character in enumerate(field):
        if character in ".[":
            return field[:position]
    return field
