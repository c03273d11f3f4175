"""What a call costs its caller: one at a time, in a transaction that is open anyway, in bulk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from benchmarks.report.goals import NO_RESULTS, ONE_CALL, OURS, REDIS_RESULTS
from benchmarks.report.record import Figures
from benchmarks.scenario import Bench, Contender, Contenders, Scenario
from benchmarks.setting.child import call
from benchmarks.systems import celery_plain, durable, procrastinate_app

ONE, BULK = 3_000, 20_000
CALLS = 20
BETWEEN = f"{OURS}, between statements"


def _rate(answer: dict[str, Any], count: int) -> Figures:
    return {"rate": (count - 1) / (answer["ended_ns"] - answer["began_ns"]) * 1e9}


def _plain(bench: Bench, count: int, *, results: bool = False) -> Contender:
    def measure() -> Figures:
        with celery_plain.store(bench.servers, results=results) as settings:
            return _rate(call("benchmarks.systems.celery_app:send", count=count, **settings), count)

    return Contender(measure, celery_plain.STORE)


def _ours(bench: Bench, function: str, **fields: Any) -> Contender:
    """Into an empty database, with no dispatcher."""

    def measure() -> Figures:
        with bench.servers.stack() as stack:
            app = durable.app_of(durable.new_service(stack, "billing"))
            answer = call(f"benchmarks.systems.durable_send:{function}", app=app, **fields)
            return answer if "rate" in answer else _rate(answer, fields["count"])

    return Contender(measure, "PostgreSQL, committed before the call returns")


def _procrastinate(bench: Bench, count: int) -> Contender:
    def measure() -> Figures:
        with bench.servers.new_database() as url:
            plain = url.replace("+psycopg", "")
            call(f"{procrastinate_app.__name__}:migrate", url=plain)
            return _rate(call(f"{procrastinate_app.__name__}:send", url=plain, count=count), count)

    return Contender(measure, "defer, synchronous connector, PostgreSQL")


@contextlib.contextmanager
def _one(bench: Bench) -> Iterator[Contenders]:
    count = bench.count(ONE)
    yield {
        OURS: _ours(bench, "send", task="bench.noop", count=count),
        f"{OURS}, with an account": _ours(bench, "send", task="bench.limit5", count=count, accounts=20),
        NO_RESULTS: _plain(bench, count),
        REDIS_RESULTS: _plain(bench, count, results=True),
        "Procrastinate": _procrastinate(bench, count),
    }


@contextlib.contextmanager
def _in_transaction(bench: Bench) -> Iterator[Contenders]:
    count = bench.count(ONE)
    yield {
        OURS: _ours(bench, "in_transaction", count=count, calls=CALLS),
        BETWEEN: _ours(bench, "in_transaction", count=count, calls=CALLS, apart=True),
        ONE_CALL: _ours(bench, "in_transaction", count=count, calls=1),
        NO_RESULTS: _plain(bench, count),
    }


@contextlib.contextmanager
def _bulk(bench: Bench) -> Iterator[Contenders]:
    count = bench.count(BULK, least=1_000)
    yield {
        OURS: _ours(bench, "send_many", task="bench.noop", count=count),
        f"{OURS}, with an account": _ours(bench, "send_many", task="bench.limit5", count=count, accounts=20),
        NO_RESULTS: _plain(bench, bench.count(ONE)),
    }


SCENARIOS = (
    Scenario(
        "enqueue-one",
        "`delay` in a loop, by one process, into an empty store; nobody consumes. Calls a second.",
        _one,
        quick=(OURS, NO_RESULTS),
    ),
    Scenario(
        "enqueue-in-transaction",
        f"What calls of `delay` add to transactions that insert a row of the user's own and commit: {CALLS} calls in a "
        f"transaction, {CALLS} with a row of the user's own between any two, or one alone. 20 transactions with the "
        "calls and 20 without in turn, and the difference of their times, a heavier commit included. Calls a second.",
        _in_transaction,
        quick=(OURS, BETWEEN, ONE_CALL, NO_RESULTS),
    ),
    Scenario(
        "enqueue-bulk",
        "One `enqueue_many` against plain Celery's loop of `delay`. Calls a second.",
        _bulk,
        quick=(OURS, NO_RESULTS),
    ),
)
