"""A service that nobody hears of: for an hour, and for ever. The holder's database has a clock that the test sets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import text

import celery_durable
from celery_durable.runtime import runtime_of
from celery_durable.store.database import Database
from holder_service import commands, store
from holder_service.semaphore import SemaphoreSettings
from holder_service.usage import ClientUsage, Usage
from tests.e2e.observe import History, all_read, operation, read_topic, replies, states, wait_ended, write_topic
from tests.harness import Service, Stack, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.postgresql, pytest.mark.kafka, pytest.mark.timeout(400)]

DEADLINE_S = 90.0
TEN_MINUTES_MS, AN_HOUR_MS = 600_000, 3_600_000

CLOCK = """
CREATE SCHEMA ahead;
CREATE TABLE ahead.by (ms bigint NOT NULL);
INSERT INTO ahead.by VALUES (0);
CREATE FUNCTION ahead.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE
    AS 'SELECT pg_catalog.clock_timestamp() + (SELECT ms FROM ahead.by) * interval ''1 ms''';
DO $$ BEGIN
    EXECUTE 'ALTER DATABASE ' || quote_ident(current_database()) || ' SET search_path = ahead, pg_catalog, public';
END $$
"""


@dataclass
class HolderDatabase:
    """The holder's database, whose clock runs ahead as far as it is told to."""

    database: Database

    @classmethod
    def of(cls, stack: Stack) -> HolderDatabase:
        """Makes the stack's holder database; no holder may have been started."""
        stack.holder_env()
        database = Database(stack.holder_url)
        with database.transaction() as connection:
            connection.exec_driver_sql(CLOCK)
        database.dispose()
        return cls(Database(stack.holder_url))

    def later(self, ms: int) -> None:
        """So much time passes, and the holder has done all that was due by then."""
        with self.database.transaction() as connection:
            connection.execute(text("UPDATE ahead.by SET ms = ms + :ms"), {"ms": ms})
        tables = store.build_tables()

        def nothing_due() -> bool:
            with self.database.reading() as connection:
                now_ms = store.clock_ms(connection)
                return not store.due_accounts(connection, tables, range(100), now_ms, limit=1)

        wait_until(nothing_due, DEADLINE_S, what="the holder's timers")

    def usage(self, account: str) -> Usage:
        """What ``holder-service accounts`` shows."""
        found = commands.usages(self.database, store.build_tables(), SemaphoreSettings())
        return next(usage for usage in found if usage.account == account)

    def client(self, account: str, client_id: str) -> ClientUsage:
        """What it shows of one service."""
        return next(each for each in self.usage(account).clients if each.client_id == client_id)


@pytest.fixture
def holder_database(real_stack: Stack) -> Iterator[HolderDatabase]:
    found = HolderDatabase.of(real_stack)
    yield found
    found.database.dispose()


def running(service: Service, account: str, flag: str) -> list[Any]:
    """Two operations of the account run until there is a file of this name."""
    results = [service.task("until").delay(account, str(service.folder / flag)) for _ in range(2)]
    for result in results:
        wait_until(lambda result=result: operation(service, result.id).state == "running", DEADLINE_S, what="it runs")  # type: ignore[misc]
    return results


def test_a_service_that_is_cut_off_and_one_that_is_gone(real_stack: Stack, holder_database: HolderDatabase) -> None:
    """Cases A14 and A20: silence frees nothing in an hour; a forfeit does, and its copy does not free it again."""
    billing, crm = real_stack.service("billing", idle_return_s=300.0), real_stack.service("crm")
    holder = real_stack.holder()
    dispatcher, worker = billing.dispatcher(), billing.worker()
    crm.dispatcher()
    crm.worker()
    account = "tenant:acme"

    held = running(billing, account, "first")
    waiting = [crm.task("work").delay(account) for _ in range(3)]
    wait_until(lambda: replies(crm, account), DEADLINE_S, what="crm is told to wait")
    dispatcher.kill()
    for _ in range(6):
        holder_database.later(TEN_MINUTES_MS)
        assert holder_database.client(account, "billing").footprint == 2
        assert states(crm, account) == {"queued": 3}
    stop = replies(billing, account)[-1]
    assert (stop["groups"], stop["ack_wanted"]) == ([], True)
    (billing.folder / "first").touch()
    wait_ended(billing, account, 2, DEADLINE_S)
    assert states(crm, account) == {"queued": 3}, "it ended, but nobody has said so"
    dispatcher = billing.dispatcher()
    assert [result.get(timeout=DEADLINE_S) for result in waiting] == [account] * 3
    assert all(result.get(timeout=5) for result in held)
    History([billing, crm]).check_bound(2)

    held = running(billing, account, "second")
    waiting = [crm.task("work").delay(account) for _ in range(2)]
    wait_until(lambda: holder_database.usage(account).waiting == 2, DEADLINE_S, what="crm is known to wait")
    dispatcher.kill()
    worker.kill()
    holder_database.later(AN_HOUR_MS)
    usage, gone = holder_database.usage(account), holder_database.client(account, "billing")
    assert (gone.footprint, gone.last_report_ms >= AN_HOUR_MS) == (2, True)
    assert states(crm, account)["queued"] == 2
    order = {"epoch": usage.epoch, "version": usage.version}
    celery_durable.forfeit(account, "billing", **order, by="kim", why="switched off", app=crm.app)
    assert [result.get(timeout=DEADLINE_S) for result in waiting] == [account] * 2
    told = "client 'billing' is forfeited by 'kim' (switched off): 2 permits"
    wait_until(lambda: told in holder.log.read_text(), DEADLINE_S, what="the holder's word of it")

    billing.dispatcher()
    billing.worker()
    wait_until(
        lambda: {operation(billing, result.id).attempt for result in held} == {2}, DEADLINE_S, what="both run again"
    )
    wait_until(lambda: holder_database.client(account, "billing").footprint == 2, DEADLINE_S, what="it counts again")
    wait_until(lambda: all_read(billing) and all_read(crm), DEADLINE_S, what="nothing under way")
    topic = runtime_of(crm.app).settings.accounts_topic
    (copy,) = [each for each in read_topic(real_stack.kafka, topic, account) if each.document["type"] == "Forfeit"]
    write_topic(real_stack.kafka, topic, [(copy.key, copy.body)])
    wait_until(lambda: all_read(crm), DEADLINE_S, what="the copy is read")
    assert holder_database.client(account, "billing").footprint == 2
    late = crm.task("work").delay(account)
    (billing.folder / "second").touch()
    assert all(result.get(timeout=DEADLINE_S) for result in held)
    assert late.get(timeout=DEADLINE_S) == account
