"""Sums of sampled stacks."""

from __future__ import annotations

import pytest

from benchmarks.report.stacks import sum_up

LINES = [
    "process 7:celery;step (celery_durable/passes.py);execute (sqlalchemy/base.py);loop (a.py) 6",
    "process 7:celery;step (celery_durable/passes.py);execute (sqlalchemy/base.py) 2",
    "thread 8;loop (a.py);loop (a.py) 2",
    "",
]


def test_a_function_counts_once_in_a_stack() -> None:
    shares = sum_up(LINES)
    assert shares.total == 10
    assert shares.itself == {"loop (a.py)": 8, "execute (sqlalchemy/base.py)": 2}
    assert shares.within == {"step (celery_durable/passes.py)": 8, "execute (sqlalchemy/base.py)": 8, "loop (a.py)": 8}


def test_the_largest_come_first_and_can_be_chosen_by_file() -> None:
    shares = sum_up(LINES)
    assert shares.top(shares.itself, 1) == [("loop (a.py)", 0.8)]
    assert shares.top(shares.within, 5, "celery_durable/") == [("step (celery_durable/passes.py)", 0.8)]


def test_a_line_without_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        sum_up(["step (celery_durable/passes.py)"])
