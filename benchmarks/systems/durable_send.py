"""celery-durable's senders, each in a process of its own."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import text

import celery_durable
from benchmarks.setting.child import gate
from benchmarks.setting.tally import Tally
from benchmarks.systems.durable_app import make_app, tally_path
from benchmarks.systems.sending import account, paced, steady, timed
from celery_durable.runtime import runtime_of


def send(app: dict[str, Any], task: str, count: int, accounts: int = 0) -> dict[str, int]:
    """``delay`` in a loop, to ``accounts`` accounts in turn; 0: a task without one."""
    function = make_app(**app).tasks[task]
    if not accounts:
        return timed(function.delay, count)
    return timed(lambda number: function.delay(account(number, accounts)), count)


def send_limited(
    app: dict[str, Any], count: int, accounts: int, limit: int, first: int = 0, interval_s: float = 0.0
) -> dict[str, int]:
    """``delay`` to ``accounts`` accounts of that ``limit`` in turn, from number ``first`` on.

    :param interval_s: one call in so long a time; 0: as fast as they go.
    """
    function = make_app(**app).tasks["bench.limited"]

    def call(number: int) -> None:
        function.delay(account(first + number, accounts), limit)

    return steady(call, count, interval_s, app["name"]) if interval_s else timed(call, count)


def send_many(app: dict[str, Any], task: str, count: int, accounts: int = 0) -> dict[str, int]:
    """One ``enqueue_many``, after another of one call."""
    function = make_app(**app).tasks[task]

    def call(number: int) -> tuple[Any, ...]:
        return (account(number, accounts),) if accounts else (number,)

    function.enqueue_many([call(0)])
    gate()
    cpu_ns, began_ns = time.process_time_ns(), time.monotonic_ns()
    function.enqueue_many(call(number) for number in range(1, count))
    return {
        "began_ns": began_ns,
        "ended_ns": time.monotonic_ns(),
        "timed": count - 1,
        "start_cpu_ns": cpu_ns,
    }


def send_work(app: dict[str, Any], count: int, account: str, duration_s: float) -> dict[str, int]:
    """``count`` calls of one account that each take ``duration_s``, in one ``enqueue_many``."""
    function = make_app(**app).tasks["bench.work1"]
    gate()
    cpu_ns, began_ns = time.process_time_ns(), time.monotonic_ns()
    function.enqueue_many((account, duration_s) for _ in range(count))
    return {
        "began_ns": began_ns,
        "ended_ns": time.monotonic_ns(),
        "timed": count,
        "start_cpu_ns": cpu_ns,
    }


def send_paced(app: dict[str, Any], count: int, account: str = "") -> dict[str, list[float]]:
    """Calls an idle service; see :func:`benchmarks.systems.sending.paced`."""
    celery_app = make_app(**app)
    tally = Tally(tally_path(app["records"]))
    if account:
        return paced(lambda now_ns: celery_app.tasks["bench.sent5"].delay(account, now_ns), tally, count)
    return paced(celery_app.tasks["bench.sent"].delay, tally, count)


def in_transaction(
    app: dict[str, Any], count: int, calls: int = 1, apart: bool = False, block: int = 20
) -> dict[str, float]:
    """What ``delay`` adds to transactions that insert a row of the user's own and commit, with it and without in turn.

    Answers calls a second of what is added, the heavier commit included; and of the calls alone, until they are written
    and with the user's own rows between them.

    :param calls: in each transaction, one after another.
    :param apart: before each call, not only the first, the transaction inserts a row of the user's own.
    """
    celery_app = make_app(**app)
    function = celery_app.tasks["bench.noop"]
    engine = runtime_of(celery_app).database.engine
    own = text("INSERT INTO orders (number) VALUES (:number)")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE IF NOT EXISTS orders (number bigint)"))
    spent_ns = {True: 0, False: 0}
    calls_ns = 0
    blocks = max(1, count // (block * calls))
    for turn in range(2 * blocks + 4):
        if turn == 4:  # so many blocks warm up
            spent_ns, calls_ns = {True: 0, False: 0}, 0
        with_call = turn % 2 == 0
        began_ns = time.perf_counter_ns()
        for _ in range(block):
            with engine.begin() as connection:
                connection.execute(own, {"number": 0})
                called_ns = time.perf_counter_ns()
                with celery_durable.using(connection):
                    for number in range(calls):
                        if apart and number:
                            connection.execute(own, {"number": number})
                        if with_call:
                            function.delay(number)
                if with_call:
                    calls_ns += time.perf_counter_ns() - called_ns
        spent_ns[with_call] += time.perf_counter_ns() - began_ns
    return {
        "rate": blocks * block * calls / (spent_ns[True] - spent_ns[False]) * 1e9,
        "calls_alone_rate": blocks * block * calls / calls_ns * 1e9,
        "transactions_rate": blocks * block / spent_ns[False] * 1e9,
    }
