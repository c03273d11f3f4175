"""A database with rows of operations in states of the test's choice."""

from __future__ import annotations

from typing import Any

from sqlalchemy import insert

from celery_durable.permits.messages import AccountLimit, AccountReply, Declared, ReplyGroup
from celery_durable.permits.state import AccountState
from celery_durable.runtime import Runtime
from celery_durable.settings import Settings
from celery_durable.store.clock import now_ms
from celery_durable.store.database import Database
from celery_durable.store.schema import ENDED_STATES, RUNNING, build_tables


def make_runtime(url: str) -> Runtime:
    """A runtime on an empty schema."""
    settings = Settings(client_id="billing", database_url=url)
    runtime = Runtime(settings, Database(url), build_tables())
    runtime.tables.metadata.create_all(runtime.database.engine)
    return runtime


def add(runtime: Runtime, operation_id: str, state: str, **values: Any) -> None:
    """Adds an operation. Times are given as ms from now: ``due_ms``, ``alive_ms``, ``expires_ms``."""
    times = {
        column: now_ms() + values.pop(name)
        for name, column in (("due_ms", "due_at"), ("alive_ms", "alive_until"), ("expires_ms", "expires_at"))
        if name in values
    }
    if state == RUNNING:
        values = {"worker": "celery@one", "run_token": f"token-{operation_id}", **values}
        times.setdefault("alive_until", now_ms() + 30_000)
        times["started_at"] = now_ms() - 2_000
    if state in ENDED_STATES:
        times["ended_at"] = now_ms()
    row = {
        "id": operation_id,
        "task": "charge",
        "account": "acme",
        "group": "",
        "queue": "celery",
        "state": state,
        "enqueued_at": now_ms() - 60_000,
        **times,
        **values,
    }
    payload = {
        "id": operation_id,
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "body": b"[]",
        "digest": "",
        "headers": {"argsrepr": "('acme',)", "kwargsrepr": "{'amount': 12}", "root_id": operation_id},
        "properties": {},
        "publish": {},
        "policy": {},
    }
    with runtime.database.transaction() as connection:
        connection.execute(insert(runtime.tables.operations).values(row))
        connection.execute(insert(runtime.tables.payloads).values(payload))


def add_account(
    runtime: Runtime,
    account: str,
    *,
    blocked: dict[str, str],
    limit: int,
    in_use: int,
    offered: int = 0,
    group_limit: int | None = None,
    source: str = "declared",
) -> None:
    """Adds an account's row with the holder's newest reply, and what this service declares."""
    reply = AccountReply(
        client_id="billing",
        incarnation="one",
        account=account,
        epoch=1,
        version=1,
        answers=1,
        groups=(ReplyGroup(permits=2, offered=offered),),
        account_limit=AccountLimit(limit=limit, in_use=in_use, source=source),
    )
    state = AccountState(account, declared=Declared(group_limit=group_limit)).to_json()
    values = {"account": account, "state": state, "blocked": blocked, "reply": reply.to_bytes().decode()}
    with runtime.database.transaction() as connection:
        connection.execute(insert(runtime.tables.accounts).values(values))
