"""What the settings of a service and of a holder have in common: where they come from, and refusals in one line."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from dotenv import dotenv_values
from pydantic import SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from celery_durable.errors import ConfigurationError
from celery_durable.names import nearest

logger = logging.getLogger(__name__)

CHARACTERS = "characters"
"""Key of a field's ``json_schema_extra``: what its ``pattern`` allows, in words."""
TABLE_PREFIX = r"^[a-z_][a-z0-9_]*$"
TABLE_PREFIX_WORDS = "lower-case letters, digits and '_', none of the digits first,"
_HIDDEN = frozenset({"database_url", "kafka_options"})
"""Fields whose value may hold a password: no message shows them."""


class Configuration(BaseSettings):
    """Base of a settings model. Units are last in a name: ``_s`` seconds, ``_ms`` milliseconds."""

    model_config = SettingsConfigDict(env_file=".env", extra="ignore", frozen=True, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_booleans(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError("a boolean is no number and no text")
        return value

    @classmethod
    def remedy(cls, field: str) -> str:
        """What to do to give ``field`` another value, as a sentence without its full stop."""
        return f"Set {_variable(cls, field)}"


Model = TypeVar("Model", bound=Configuration)


def load(model: type[Model], values: Mapping[str, Any], required: Collection[str]) -> Model:
    """The settings: ``values`` over the environment over ``.env`` over the defaults.

    :param required: text settings that must not be empty.
    :raises ConfigurationError: a value is out of bounds, unknown or missing; the message names field, value and remedy,
        and never shows a secret.
    """
    for field in values:
        if field not in model.model_fields:
            raise ConfigurationError(f"{field}: there is no such setting{nearest(field, model.model_fields)}")
    try:
        _warn_of_unknown_environment(model)
        settings = model(**values)
    except ValidationError as error:
        raise ConfigurationError(_describe(model, error)) from None
    except (UnicodeDecodeError, OSError) as error:
        # Without the error's own text, which would show what the file holds.
        raise ConfigurationError(f".env: it cannot be read ({type(error).__name__}): save it as UTF-8 text") from None
    except SettingsError as error:
        # Its cause holds the whole text that could not be parsed, maybe with a password.
        raise ConfigurationError(f"{error}: a dictionary is given as one JSON object") from None
    for field in required:
        value = getattr(settings, field)
        if not (value.get_secret_value() if isinstance(value, SecretStr) else value):
            raise ConfigurationError(
                f"{field} is not set: {model.model_fields[field].description} {model.remedy(field)}"
            )
    return settings


def refuse_above(field: str, value: float, other: str, other_value: float, share: float = 1.0, words: str = "") -> None:
    """For a model's validator: refuses a value of ``field`` that is above what another setting allows.

    :param share: how much of the other setting's value is allowed, in the field's unit.
    :param words: says how, ``"half of "``.
    :raises ValueError: the value is above; the message names both settings, their values, and what to set.
    """
    if value > other_value * share:
        raise ValueError(
            f"{field} = {value:g} is above {words}{other} = {other_value:g}: "
            f"set {field} to {other_value * share:g} at most, or {other} to {value / share:g} at least"
        )


def _describe(model: type[Configuration], error: ValidationError) -> str:
    parts = []
    for problem in error.errors(include_url=False, include_context=False):
        message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ").replace("\n", " ")
        if problem["type"] == "string_pattern_mismatch":
            message = f"only {_characters(model, str(problem['loc'][0]))} may be in it"
        if not problem["loc"]:
            parts.append(message)
            continue
        field = str(problem["loc"][0])
        name = ".".join(str(part) for part in problem["loc"])
        shown = "(hidden)" if field in _HIDDEN else _short(problem["input"])
        parts.append(f"{name} = {shown}: {message}. {model.remedy(field)}")
    return "; ".join(parts)


def _characters(model: type[Configuration], field: str) -> str:
    """What its pattern means, in words: each setting that has one says so."""
    extra = model.model_fields[field].json_schema_extra
    return str(extra[CHARACTERS]) if isinstance(extra, dict) else "other characters"


def _warn_of_unknown_environment(model: type[Configuration]) -> None:
    known = {_variable(model, field) for field in model.model_fields}
    prefix = _variable(model, "")
    for source, names in (("", os.environ), (" in .env", dotenv_values(".env"))):
        for name in names:
            if name.upper().startswith(prefix) and name.upper() not in known:
                logger.warning("%s%s: there is no such setting%s; ignored", name, source, nearest(name.upper(), known))


def _variable(model: type[Configuration], field: str) -> str:
    return f"{model.model_config.get('env_prefix', '')}{field.upper()}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
