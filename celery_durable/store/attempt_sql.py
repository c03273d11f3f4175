"""The hand-written statements of an attempt's life, for PostgreSQL and SQLite.

Each settle is an UPDATE on the run token, and what is written besides for the row ``done`` that it returned: in one
statement with CTEs on PostgreSQL, in one short transaction on SQLite.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sqlalchemy.sql.compiler import IdentifierPreparer

from celery_durable.store.clock import NOW_MS_SQL
from celery_durable.store.schema import Tables
from celery_durable.store.untold import GRACE_MS

RETURNED = ("id", "account", "state", "worker", "started_at")
"""Columns of the row that a settle changed."""

_POLICY = "(SELECT p.policy FROM {payloads} AS p WHERE p.id = {operations}.id)"
_MINE = "WHERE id = :id AND run_token = :token AND state = 'running'"
_CANCELLED = "cancel_requested_at IS NOT NULL"

_START = (
    """
    UPDATE {operations} SET state = 'running', run_token = :token, worker = :worker, started_at = {now},
        alive_until = {now} + CAST(:timeout_ms AS bigint)
    WHERE id = :id AND generation = :generation AND attempt = :attempt
        AND (state = 'admitted' AND (expires_at IS NULL OR expires_at > {now})
             OR state = 'running' AND run_token = :token)
    RETURNING cancel_requested_at, account, """
    + _POLICY
)
# One thread beats for all attempts of its process: it must not wait for a row that somebody holds.
_BEAT = f"""
    UPDATE {{operations}} SET alive_until = {{now}} + CAST(:timeout_ms AS bigint)
    WHERE order_no = (SELECT order_no FROM {{operations}} {_MINE} {{skip_locked}})
    RETURNING cancel_requested_at
    """
_OWNS = f"SELECT 1 FROM {{operations}} {_MINE}"
_WRITTEN = """
    SELECT CASE WHEN state IN ('succeeded', 'failed', 'cancelled') AND run_token = :token THEN state END,
        (SELECT a.outcome FROM {attempts} AS a WHERE a.operation_id = o.id AND a.run_token = :token
         ORDER BY a.no DESC LIMIT 1)
    FROM {operations} AS o WHERE o.id = :id
    """

_ENDED = """
    ended_at = {now}, alive_until = NULL, due_at = NULL, result_content_type = :content_type,
    result_content_encoding = :content_encoding, result = :result, error = :error, traceback = :traceback
    """
_END = f"UPDATE {{operations}} SET state = CAST(:state AS varchar(16)), {_ENDED} {_MINE}"
_REVOKE = f"""
    UPDATE {{operations}} SET state = 'cancelled', {_ENDED}
    WHERE id = :id AND generation = :generation AND attempt = :attempt
        AND (state = 'admitted' OR state = 'running' AND run_token = :token)
    """


def _again(*, state: str, due: str = "{now}", more: str = "") -> str:
    # A cancel request wins over running again.
    return f"""
    UPDATE {{operations}} SET {more} state = CASE WHEN {_CANCELLED} THEN 'cancelled' ELSE {state} END,
        attempt = attempt + CASE WHEN {_CANCELLED} THEN 0 ELSE 1 END, sends = 0, alive_until = NULL,
        run_token = CASE WHEN {_CANCELLED} THEN run_token END, ended_at = CASE WHEN {_CANCELLED} THEN {{now}} END,
        due_at = CASE WHEN {_CANCELLED} THEN NULL ELSE {due} END,
        error = :error, traceback = :traceback {_MINE}
    """


_RETRY = _again(
    state="CAST(:state AS varchar(16))",
    due="coalesce(CAST(:due_at AS bigint), {now} + CAST(:delay_ms AS bigint))",
    more="""
        retries = :retries, queue = :queue, priority = :priority,
        admitted_at = CASE WHEN CAST(:state AS varchar(16)) = 'scheduled' THEN NULL ELSE admitted_at END,
        expires_at = coalesce(CAST(:expires_at AS bigint), {now} + CAST(:expires_delay_ms AS bigint), expires_at),
        """,
)
_REPEAT = _again(state="'retrying'")

_WAKE = "INSERT INTO {wakes} (account) SELECT done.account FROM {done} WHERE done.account IS NOT NULL"
_WAKE_IF_RELEASED = f"{_WAKE} AND done.state <> 'retrying'"
_HISTORY = """
    INSERT INTO {attempts} (operation_id, generation, attempt, outcome, worker, run_token, started_at, ended_at, error)
    SELECT done.id, CAST(:generation AS integer), CAST(:attempt AS integer), CAST(:outcome AS varchar(16)),
        done.worker, CAST(:token AS varchar(64)), done.started_at, {now}, CAST(:error AS text) FROM {done}
    """
_UNTOLD = f"""
    INSERT INTO {{untold}} (operation_id, generation, due_at, tries)
    SELECT done.id, CAST(:generation AS integer), {{now}} + {GRACE_MS}, 0 FROM {{done}}
    WHERE done.state IN ('succeeded', 'failed', 'cancelled')
    ON CONFLICT (operation_id) DO UPDATE
    SET generation = excluded.generation, due_at = excluded.due_at, tries = excluded.tries
    """
_MESSAGE = """
    UPDATE {payloads} SET body = :body, content_type = :body_type, content_encoding = :body_encoding,
        headers = {headers}, properties = {properties}, publish = {publish}
    FROM {done} WHERE {payloads}.id = done.id AND done.state <> 'cancelled'
    """


@dataclass(frozen=True, slots=True)
class Settle:
    """One settle. PostgreSQL runs ``whole``; SQLite runs ``update`` and then, with its row, each of ``then``."""

    whole: str
    update: str
    then: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Settles:
    """One settle in two forms: as it is, and with the mark that its end is to be told, where it is one."""

    silent: Settle
    marked: Settle


class AttemptStatements:
    """The statements for one client's tables, in the driver's own parameter style."""

    def __init__(self, tables: Tables, dialect: str, preparer: IdentifierPreparer) -> None:
        self._postgresql = dialect == "postgresql"
        names = {
            name: preparer.format_table(getattr(tables, name))
            for name in ("operations", "payloads", "attempts", "untold", "wakes")
        }
        as_json = "CAST(:{} AS json)" if self._postgresql else ":{}"
        columns = ", ".join(f":done_{column} AS {column}" for column in RETURNED)
        self._words = {
            **names,
            "now": NOW_MS_SQL[dialect],
            "headers": as_json.format("headers"),
            "properties": as_json.format("properties"),
            "publish": as_json.format("publish"),
            "skip_locked": "FOR UPDATE SKIP LOCKED" if self._postgresql else "",
            "done": "done" if self._postgresql else f"(SELECT {columns}) AS done",
        }
        self.start = self._sql(_START)
        self.beat = self._sql(_BEAT)
        self.owns = self._sql(_OWNS)
        self.written = self._sql(_WRITTEN)
        self.end = self._settle(_END, _WAKE)
        self.end_without_account = self._settle(_END)
        self.fail = self._settle(_END, _WAKE, _HISTORY)
        self.revoke = self._settle(_REVOKE, _WAKE)
        self.repeat = self._settle(_REPEAT, _WAKE_IF_RELEASED, _HISTORY)
        self.retry = self._settle(_RETRY, _WAKE_IF_RELEASED, _HISTORY, _MESSAGE)

    def _settle(self, update: str, *then: str) -> Settles:
        return Settles(self._built(update, *then), self._built(update, *then, _UNTOLD))

    def _built(self, update: str, *then: str) -> Settle:
        update = f"{update} RETURNING {', '.join(RETURNED)}"
        if not then:
            return Settle(self._sql(update), self._sql(update), ())
        parts = [f"done AS ({update})", *(f"then_{number} AS ({part})" for number, part in enumerate(then))]
        whole = f"WITH {', '.join(parts)} SELECT {', '.join(RETURNED)} FROM done"
        return Settle(self._sql(whole), self._sql(update), tuple(self._sql(part) for part in then))

    def _sql(self, template: str) -> str:
        sql = " ".join(template.format(**self._words).split())
        return re.sub(r"(?<!:):([a-z_]+)", r"%(\1)s", sql) if self._postgresql else sql
