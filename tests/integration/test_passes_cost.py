"""What a pass costs, in statements and in rows that it reads."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import event, text

from celery_durable.permits.messages import ReplyGroup
from tests.dispatching import Service, counted_statements


def test_the_statements_of_a_pass_do_not_grow_with_accounts_or_groups(postgresql: Service) -> None:
    """One statement of a kind, however many accounts: what grows is the rows."""
    service = postgresql
    passes = service.passes()

    def statements(accounts: list[str]) -> int:
        for account in accounts:
            for group in ("x", "y"):
                service.add(f"{account}-{group}-{time.monotonic_ns()}", account=account, group=group)
        with counted_statements(service.database) as counted:
            assert passes.step() is None
        return len(counted)

    names = [f"n{n:02}" for n in range(30)]
    statements(names)
    for name in names:
        service.sent(name)
    service.apply(
        *(
            service.reply(ReplyGroup(group="x", permits=9), ReplyGroup(group="y", permits=9), account=one)
            for one in names
        )
    )
    one, many = statements(names[:1]), statements(names)
    assert one == many
    assert many <= 14, "begin, lock, what is read, admission, the account rows, the counter and the reports"


def test_a_pass_reads_no_more_rows_however_many_wait(postgresql: Service) -> None:
    """A29: with 20,000 waiting it reads by index, and of what waits only up to the cap of the counts."""
    service = postgresql
    operations = service.tables.operations
    waiting = (
        f'INSERT INTO {operations.name} (id, task, account, "group", queue, state, enqueued_at) '
        "SELECT 'op' || n, 't', 'acme', '', 'celery', 'queued', n FROM generate_series(1, 20000) n"
    )
    with service.database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(waiting))
        connection.execute(text("VACUUM ANALYZE"))
    service.add("last")
    read: list[tuple[int, int]] = []
    statement = f"SELECT seq_tup_read, idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = '{operations.name}'"

    def note(connection: Any) -> None:
        read.append(tuple(connection.exec_driver_sql(statement).one()))

    passes = service.passes()
    event.listen(service.database.engine, "commit", note)
    try:
        assert passes.step() is None
        service.lease(2)
    finally:
        event.remove(service.database.engine, "commit", note)
    assert service.in_use() == 2
    assert len(read) >= 2
    assert all(by_scan == 0 and by_index < 1_100 for by_scan, by_index in read), read
