"""A real dispatcher and worker with a holder whose every word the test chooses, over real topics."""

from __future__ import annotations

import time
from typing import Any

import pytest
from sqlalchemy import text

import celery_durable
from celery_durable.permits.messages import AccountReply, ReplyGroup
from celery_durable.runtime import Runtime, runtime_of
from tests.e2e.observe import History, operation, outbox_depth, reports, rows, write_topic
from tests.harness import Service, Stack, wait_until

pytestmark = pytest.mark.processes

IDLE_RETURN_S = 1.0


class Holder:
    """Answers as the test says. Versions grow by themselves."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._epoch = time.time_ns() // 1_000_000
        self._version = 0

    def report(self, account: str, above: int = 0, **has: Any) -> dict[str, Any]:
        """Waits for a report with a ``seq`` above this one, and these values; returns it."""

        def look() -> dict[str, Any] | None:
            found = [each for each in reports(self._service, account) if each["seq"] > above]
            found = [each for each in found if has.items() <= {**each, **_only_group(each)}.items()]
            return found[-1] if found else None

        return wait_until(look, 30, what=f"a report on {account} above {above} with {has}")

    def reply(self, account: str, answers: int, **values: Any) -> AccountReply:
        """Sends a newer reply; ``values`` are of its one group, but for ``ack_wanted``."""
        self._version += 1
        ack_wanted = values.pop("ack_wanted", False)
        ((incarnation,),) = rows(self._service, "client", "incarnation")
        reply = AccountReply(
            client_id=self._service.name,
            incarnation=incarnation,
            account=account,
            epoch=self._epoch,
            version=self._version,
            answers=answers,
            ack_wanted=ack_wanted,
            groups=(ReplyGroup(**values),) if values else (),
        )
        self.send(reply)
        return reply

    def send(self, *replies: AccountReply) -> None:
        """Sends replies as they are."""
        topic = runtime_of(self._service.app).settings.replies_topic(self._service.name)
        write_topic(self._service.stack.kafka, topic, [(reply.account, reply.to_bytes()) for reply in replies])


def _only_group(report: dict[str, Any]) -> dict[str, Any]:
    return dict(report["groups"][0]) if report["groups"] else {}


@pytest.fixture(scope="module")
def service(module_stack: Stack) -> Service:
    service = module_stack.service(idle_return_s=IDLE_RETURN_S)
    service.dispatcher()
    service.worker()
    return service


@pytest.fixture
def holder(service: Service) -> Holder:
    return Holder(service)


@pytest.fixture
def runtime(service: Service) -> Runtime:
    return runtime_of(service.app)


def proceeds(service: Service, holder: Holder, account: str) -> None:
    """The dispatcher has read all replies so far and made passes since: an operation of another account runs."""
    result = service.task("single").delay(account)
    holder.reply(account, holder.report(account)["seq"], permits=1)
    assert result.get(timeout=60) == account


def test_a_grant_admits_nothing_before_it_is_confirmed(service: Service, holder: Holder) -> None:
    """Case A2: nothing of a grant is admitted before a report claimed it and the holder confirmed it."""
    account = "tenant:granted"
    results = [service.task("work").delay(account) for _ in range(2)]
    seq = holder.report(account, waiting=2)["seq"]
    offer = holder.reply(account, seq, offered=2, ack_wanted=True)
    claim = holder.report(account, seq)
    assert claim["ack"] == {"epoch": offer.epoch, "version": offer.version}
    proceeds(service, holder, "tenant:other-2")
    assert [operation(service, result.id).state for result in results] == ["queued", "queued"]
    assert not History([service]).starts(account)
    holder.reply(account, claim["seq"], permits=1)
    wait_until(lambda: len(History([service]).starts(account)) == 2, 60, what="both run on the one that was confirmed")
    History([service]).check_bound(1, account=account)


def test_a_claim_ceiling_is_never_passed(service: Service, holder: Holder) -> None:
    """Case A6: one-shot permits: however many are free, no more is claimed than the ceiling says."""
    account = "tenant:ceiling"
    service.task("work").enqueue_many([(account,)] * 6)
    seq = holder.report(account)["seq"]
    holder.reply(account, seq, permits=5, claims=2)
    spent = holder.report(account, seq, claimed=2, released=2)
    proceeds(service, holder, "tenant:other-6")
    assert len(History([service]).starts(account)) == 2
    holder.reply(account, spent["seq"], permits=1, claims=5)
    holder.report(account, spent["seq"], claimed=5, released=5)
    assert len(History([service]).starts(account)) == 5
    History([service]).check_bound(2, account=account)


def test_what_was_given_back_is_not_taken_from_an_older_reply(service: Service, holder: Holder) -> None:
    """Case A7: a group that was given back takes nothing from a reply sent before, whatever its version."""
    account = "tenant:returned"
    first = service.task("work").delay(account)
    seq = holder.report(account)["seq"]
    holder.reply(account, seq, permits=2)
    assert first.get(timeout=60) == account
    returned = holder.report(account, seq, groups=[])
    late = service.task("work").delay(account)
    # It is newer than all that the client knows, but was made before its holder heard that the group went back.
    holder.reply(account, seq, permits=2)
    proceeds(service, holder, "tenant:other-7")
    asked = holder.report(account, returned["seq"], waiting=1, keeps=0)
    assert operation(service, late.id).state == "queued"
    holder.reply(account, asked["seq"], permits=1)
    assert late.get(timeout=60) == account


def test_old_replies_give_nothing(service: Service, holder: Holder) -> None:
    """Case A21: copies of replies of an account's earlier life give nothing to the row that was made again."""
    account, newest = "tenant:reborn", 0
    for _ in range(2):
        result = service.task("work").delay(account)
        seq = holder.report(account, newest, waiting=1)["seq"]
        given = holder.reply(account, seq, permits=2)
        assert result.get(timeout=60) == account
        returned = holder.report(account, seq, groups=[])
        holder.reply(account, returned["seq"])
        wait_until(lambda: not rows(service, "accounts", "account", account=account), 30, what="the row is deleted")
        holder.send(given, given)
        answer = holder.report(account, returned["seq"])
        assert not answer["groups"]
        newest = answer["seq"]
        holder.reply(account, newest)
        wait_until(lambda: not rows(service, "accounts", "account", account=account), 30, what="it is deleted again")


def test_a_report_and_its_cause_commit_together(service: Service, holder: Holder, runtime: Runtime) -> None:
    """Case B1: a pass that cannot stage its report leaves nothing behind; a caller that rolls back sends nothing."""
    account, table = "tenant:atomic", runtime.tables.outbox.name
    with runtime.database.transaction() as connection, celery_durable.using(connection):
        service.task("work").delay("tenant:never")
        connection.rollback()
    with _refused(runtime, table, account):
        result = service.task("work").delay(account)
        dispatcher_log = service.folder / f"{service.name}-dispatcher1.log"
        wait_until(lambda: f"account '{account}': its pass failed" in dispatcher_log.read_text(), 30, what="failure")
        proceeds(service, holder, "tenant:other-1")
        assert not rows(service, "accounts", "account", account=account)
        assert rows(service, "wakes", "account", account=account) == [(account,)]
        assert not outbox_depth(service)
        assert not reports(service, account)
    holder.reply(account, holder.report(account)["seq"], permits=1)
    assert result.get(timeout=60) == account
    assert not reports(service, "tenant:never")
    assert not rows(service, "operations", "id", account="tenant:never")


class _refused:
    """While this lasts, the database refuses every outbox row of the account."""

    def __init__(self, runtime: Runtime, table: str, account: str) -> None:
        self._runtime = runtime
        if runtime.database.dialect == "postgresql":
            self._begin = [
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
                "$$BEGIN RAISE EXCEPTION 'refused by the test'; END$$",
                f"CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON {table} DEFERRABLE INITIALLY IMMEDIATE "
                f"FOR EACH ROW WHEN (NEW.key = '{account}') EXECUTE FUNCTION refuse()",
            ]
            self._end = [f"DROP TRIGGER refuse ON {table}", "DROP FUNCTION refuse()"]
        else:
            self._begin = [
                f"CREATE TRIGGER refuse AFTER INSERT ON {table} WHEN NEW.key = '{account}' "
                "BEGIN SELECT RAISE(ABORT, 'refused by the test'); END"
            ]
            self._end = ["DROP TRIGGER refuse"]

    def __enter__(self) -> None:
        self._run(self._begin)

    def __exit__(self, *_: object) -> None:
        self._run(self._end)

    def _run(self, statements: list[str]) -> None:
        with self._runtime.database.transaction() as connection:
            for statement in statements:
                connection.execute(text(statement))
