"""The events of Celery that say what a row says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from celery_durable.monitoring.reasons import Known, queued_reason
from celery_durable.store.schema import CANCELLED, FAILED, QUEUED, SCHEDULED, SUCCEEDED


@dataclass(frozen=True, slots=True)
class Event:
    """One event of Celery about one operation."""

    type: str
    fields: dict[str, Any]
    worker: str | None = None
    """Its sender; None: the client, which makes no worker."""
    gone: bool = False
    """The sender does not live any more."""


def waiting_text(row: Any, known: Known) -> str:
    """Why the operation waits; empty if it does not."""
    if row.state == SCHEDULED:
        return "waits: not due yet"
    return f"waits: {queued_reason(row.group, known)}" if row.state == QUEUED else ""


def waits(row: Any, text: str) -> Event:
    """It is there, and why it waits."""
    headers = row.headers or {}
    fields = {
        **_names(row),
        "args": headers.get("argsrepr") or "()",
        "kwargs": " ".join([headers.get("kwargsrepr") or "{}", "|", *_where(row), text]),
        "retries": row.retries,
        "root_id": headers.get("root_id"),
        "parent_id": headers.get("parent_id"),
        "eta": None,
        "expires": None,
        "queue": row.queue,
    }
    return Event("task-sent", fields)


def by_worker(row: Any) -> bool:
    """Whether a worker saw the end, and announces it."""
    if row.worker is None or row.started_at is None:
        return False
    return bool(row.state == SUCCEEDED or (row.state == FAILED and not row.lost))


def ended(row: Any, worker: str, *, gone: bool) -> Event:
    """It has ended. ``worker``: who says so; ``gone``: it does not live."""
    return Event(*_end(row), worker, gone)


def hint(row: Any) -> Event:
    """It has ended, and no worker is known that might say so: Flower's state stays, the text does not mislead."""
    text = f"ended as {row.state}: {row.error or 'no reason given'}; its state here follows with the first worker"
    return Event("task-sent", {**_names(row), "kwargs": " ".join(["|", *_where(row), text])})


def retried(row: Any) -> Event:
    """Its worker was lost, and it will run again."""
    fields = {**_names(row), "exception": row.error or "its worker was lost", "traceback": ""}
    return Event("task-retried", fields, row.worker, gone=True)


def _end(row: Any) -> tuple[str, dict[str, Any]]:
    if row.state == SUCCEEDED:
        # Without the result: it may be large, and of any serializer.
        return "task-succeeded", {**_names(row), "runtime": max(0, row.ended_at - row.started_at) / 1000}
    if row.state == CANCELLED:
        expired = row.expires_at is not None and row.expires_at <= row.ended_at
        return "task-revoked", {**_names(row), "terminated": False, "signum": None, "expired": expired}
    error = row.error or "failed before any worker ran it"
    return "task-failed", {**_names(row), "exception": error, "traceback": row.traceback or error}


def _names(row: Any) -> dict[str, Any]:
    return {"uuid": row.id, "name": row.task}


def _where(row: Any) -> list[str]:
    where = [f"account={row.account!r}"] if row.account is not None else []
    return where + ([f"group={row.group!r}"] if row.group else [])
