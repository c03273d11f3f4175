"""Every error that celery-durable raises by design. Each message names the field, the value and the remedy."""

from __future__ import annotations

import click


class DurableError(Exception):
    """Base class of all errors of celery-durable."""


class ConfigurationError(DurableError, click.ClickException):
    """A setting, a task's declaration or the surroundings are wrong; processes print it in one line and exit 2.

    It is one of click's errors, so that every command of Celery prints it so: a worker checks declarations before any
    signal that we could catch it in.
    """

    exit_code = 2

    def format_message(self) -> str:
        """The message as one line."""
        return " ".join(self.message.split())


class SchemaError(ConfigurationError):
    """The database's schema is missing, older or newer than this code."""


class EnqueueError(DurableError, ValueError):
    """A call that cannot become an operation: nothing was written."""


class DuplicateOperationError(EnqueueError):
    """The same operation ID was enqueued with another task or body. The first row stays as it is."""


class OperationNotFound(DurableError, LookupError):
    """There is no operation with this ID: never enqueued here, not committed yet, or deleted after its end."""


class NonRetryable(Exception):
    """Raise it, or a subclass, in a body: the operation fails at once, whatever ``autoretry_for`` and ``self.retry()``
    say. For what no other attempt can mend, such as a declined card."""


class AttemptLost(DurableError):
    """The run token of this attempt is no longer the operation's: another attempt owns it, or it ended."""
