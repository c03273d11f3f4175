"""What a client's passes admit on real databases, with replies made by hand."""

from __future__ import annotations

from sqlalchemy import insert

from celery_durable.permits.messages import Blocked, ReplyGroup
from celery_durable.store.clock import now_ms
from tests.dispatching import Service
from tests.harness import wait_until


def test_an_operation_waits_until_the_holder_has_given_a_permit(service: Service) -> None:
    """A2, A21: a grant is claimed by a report and admits nothing; the lease that confirms it does."""
    service.add("op")
    service.run_passes()
    report = service.sent()
    assert report is not None
    assert [(one.group, one.waiting, one.claimed) for one in report.groups] == [("", 1, 0)]
    service.apply(service.reply(ReplyGroup(offered=1), ack_wanted=True))
    assert service.ids("queued") == ["op"]
    claim = service.sent()
    assert claim is not None
    assert claim.seq > report.seq
    assert claim.ack is not None
    service.apply(service.reply(ReplyGroup(permits=1)))
    row = service.row("op")
    assert (row.state, row.sends, row.attempt) == ("admitted", 1, 1)
    assert row.admitted_at is not None
    assert row.due_at > row.admitted_at
    assert [(one.id, one.attempt, one.generation, one.queue) for one in service.handed] == [("op", 1, 1, "celery")]


def test_a_spare_permit_serves_a_new_operation_without_a_message(service: Service) -> None:
    """A3; A6: a claim within a lease sends nothing."""
    service.add("first")
    service.run_passes()
    service.lease(2)
    service.sent()
    service.add("second")
    service.run_passes()
    assert service.ids("admitted") == ["first", "second"]
    service.end("first")
    service.add("third")
    service.run_passes()
    assert service.ids("admitted") == ["second", "third"]
    assert service.report() is None


def test_neither_permits_nor_the_claim_ceiling_is_passed(service: Service) -> None:
    """A6."""
    service.add(*(f"op{n}" for n in range(6)))
    service.run_passes()
    service.lease(2, claims=3)
    assert service.in_use() == 2
    service.end(service.ids("admitted")[0])
    service.run_passes()
    assert service.in_use() == 2
    service.end(*service.ids("admitted"))
    service.run_passes()
    assert service.in_use() == 0
    assert len(service.ids("queued")) == 3


def test_a_full_group_hides_no_other(service: Service) -> None:
    """A10, with 10,000 waiting in the full one."""
    service.add(*(f"full{n}" for n in range(10_000)), group="full")
    service.add("one", group="other")
    service.run_passes()
    service.sent()
    service.apply(
        service.reply(ReplyGroup(group="other", permits=1), blocked=(Blocked(group="full", reason="group_limit"),))
    )
    assert service.ids("admitted") == ["one"]
    account = service.account()
    assert account is not None
    assert account.blocked == {"full": "group_limit"}


def test_pause_admits_nothing_and_resume_needs_no_enqueue(service: Service) -> None:
    """A13: a lease that is taken away admits nothing more; running work goes on; what waits goes on with Resume."""
    service.add("first")
    service.run_passes()
    service.lease(2)
    service.change("first", state="running", run_token="r")
    service.sent()
    paused = (Blocked(group="", reason="paused"),)
    service.apply(service.reply(ReplyGroup(permits=0), ack_wanted=True, blocked=paused))
    service.add("second")
    service.run_passes()
    assert service.ids("queued") == ["second"]
    assert service.row("first").state == "running"
    assert service.account().blocked == {"": "paused"}  # type: ignore[union-attr]
    service.lease(2)
    assert service.ids("admitted") == ["second"]


def test_a_refusal_costs_no_attempt(service: Service) -> None:
    """A27."""
    service.add("op")
    for _ in range(3):
        service.run_passes()
        service.sent()
        service.apply(service.reply(blocked=(Blocked(group="", reason="account_limit"),)))
    row = service.row("op")
    assert (row.state, row.attempt, row.sends, row.worker_losses) == ("queued", 1, 0, 0)
    assert service.count("attempts") == 0


def test_first_come_first_served_in_a_group_and_priority_first(service: Service) -> None:
    """A31: by order of insertion, within a millisecond too."""
    service.add(*(f"op{n}" for n in range(5)), group="g")
    service.add("urgent", group="g", priority=5)
    service.run_passes()
    order = []
    service.lease(1, group="g")
    for _ in range(6):
        (running,) = service.ids("admitted")
        order.append(running)
        service.end(running)
        service.run_passes()
    assert order == ["urgent", "op0", "op1", "op2", "op3", "op4"]
    assert service.handed[0].id == "urgent"


def test_many_are_admitted_over_several_passes(database_url: str) -> None:
    """More than pass_admit_max at once: the rest follows without a wake."""
    service = Service(database_url, pass_admit_max=3)
    service.add(*(f"op{n}" for n in range(8)))
    service.run_passes()
    service.lease(8)
    assert service.in_use() == 3
    service.run_passes()
    assert service.in_use() == 8
    service.close()


def test_more_wait_than_are_counted(database_url: str) -> None:
    """A30: operations are counted up to 1,000, and as many are admitted: those behind them are not forgotten."""
    service = Service(database_url, pass_admit_max=100_000)
    service.add(*(f"op{n}" for n in range(1_300)))
    service.run_passes()
    service.lease(1_016)
    service.run_passes()
    assert service.in_use() == 1_016
    report = service.report()
    assert report is not None
    assert [(one.claimed - one.released, one.waiting) for one in report.groups] == [(1_016, 284)]
    service.close()


def test_an_account_with_ten_thousand_groups_works(service: Service) -> None:
    """A38: report and row stay bounded."""
    groups = [f"g{n:05}" for n in range(10_000)]
    with service.database.transaction() as connection:
        connection.execute(
            insert(service.tables.operations).values(enqueued_at=now_ms()),
            [
                {"id": one, "account": "acme", "group": one, "queue": "q", "task": "t", "state": "queued"}
                for one in groups
            ],
        )
        connection.execute(insert(service.tables.wakes), [{"account": "acme"}])
    service.run_passes()
    report = service.sent()
    assert report is not None
    assert len(report.groups) == 200
    service.apply(service.reply(*(ReplyGroup(group=one.group, permits=1) for one in report.groups)))
    assert service.in_use() == 200
    account = service.account()
    assert account is not None
    assert len(account.state) < 200_000


def test_an_idle_account_leaves_no_row(database_url: str) -> None:
    """E9: a lease that is not used goes back, and the answered account's row is deleted."""
    service = Service(database_url, idle_return_s=0.05)
    passes = service.passes()
    service.add("op")
    service.run_passes(passes)
    service.lease(1)
    service.end("op")

    def nothing_left() -> bool:
        service.run_passes(passes)
        report = service.report()
        return report is not None and not report.groups

    def gone() -> bool:
        service.run_passes(passes)
        return service.account() is None

    wait_until(nothing_left, what="the lease goes back")
    service.sent()
    service.apply(service.reply())
    wait_until(gone, what="the row is gone")
    assert service.count("wakes") == 0
    service.close()


def test_the_report_says_the_smallest_that_was_declared(service: Service) -> None:
    """E2, on one client's side."""
    with service.database.transaction() as connection:
        service.insert(connection, ["a", "b"], wakes=False)
        rows = [("limit", 5), ("limit", 3), ("group_limit", 2), ("mutex", None)]
        for name, value in rows:
            connection.execute(insert(service.tables.wakes), [{"account": "acme", name: value}])
    service.run_passes()
    report = service.report()
    assert report is not None
    assert (report.declared.limit, report.declared.group_limit, report.declared.mutex) == (3, 2, False)
