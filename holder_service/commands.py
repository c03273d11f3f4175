"""What an operator asks of the holder's database, beside a running holder: its accounts, and the word to go on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from celery_durable.errors import DurableError
from celery_durable.store import counters
from celery_durable.store.database import Database
from holder_service import life, semaphore, store, usage
from holder_service.life import Rebuild
from holder_service.semaphore import SemaphoreSettings
from holder_service.store import HolderTables, VersionMoved
from holder_service.usage import Usage

TRIES_MAX = 20


class CommandRefused(DurableError):
    """The command cannot be obeyed now; the message says why, and what to do."""


def usages(database: Database, tables: HolderTables, settings: SemaphoreSettings) -> Iterator[Usage]:
    """Every account as people see it, in the accounts' order."""
    with database.reading() as connection:
        for rows in store.all_rows(connection, tables):
            now_ms = store.clock_ms(connection)
            for row in sorted(rows, key=lambda row: row.account):
                yield usage.of(row.state, now_ms, settings)


def go(database: Database, tables: HolderTables, account: str | None) -> int:
    """Stops waiting, in one account or (None) in all, for clients that have not acknowledged a new epoch.

    Where the topic was lost together with the database, it lets the holder begin. Returns how many accounts waited.
    A running holder sees it within a second or two.

    :raises CommandRefused: there is nothing that could go on now.
    """
    with database.reading() as connection:
        present = life.load(connection, tables)
    if present is None:
        raise CommandRefused("this database has not begun its life: start `holder-service run` first")
    if present.phase == "rebuilding":
        progress = present.rebuild or Rebuild()
        raise CommandRefused(
            f"the accounts are still being rebuilt ({progress.read} of {progress.total} messages read): "
            "run this again when `holder-service run` says that it is in service"
        )
    if present.phase == "topic_lost":
        if account is not None:
            raise CommandRefused("database and topic were lost together: no account is known; use --all")
        with database.transaction("go.begin") as connection:
            life.change(connection, tables, present, phase="rebuilding", rebuild=Rebuild())
        return 0
    if account is not None:
        with database.reading() as connection:
            known = store.load_rows(connection, tables, [account])
        if not known:
            raise CommandRefused(f"account {account!r}: the holder has no row of it, so nothing is in use or waiting")
        return _go(database, tables, [account])
    with database.reading() as connection:
        return sum(_go(database, tables, [row.account for row in rows]) for rows in store.all_rows(connection, tables))


def _go(database: Database, tables: HolderTables, accounts: Sequence[str]) -> int:
    for _ in range(TRIES_MAX):
        try:
            with database.transaction("go.accounts") as connection:
                rows = store.load_rows(connection, tables, accounts).values()
                waiting = [(row, gone_on) for row in rows if (gone_on := semaphore.go(row.state)) != row.state]
                versions = counters.draw(connection, tables.counters, store.VERSION_COUNTER, max(1, len(waiting)))
                now_ms = store.clock_ms(connection)
                writes = [
                    store.rewrite(row, version, state, due_at_ms=now_ms)
                    for (row, state), version in zip(waiting, versions, strict=False)
                ]
                store.write_rows(connection, tables, writes)
                return len(writes)
        except VersionMoved:
            continue
    raise CommandRefused("a running holder changed the accounts each time: run this again")
