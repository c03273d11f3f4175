"""What the protocol says in the situations of a capacity."""

from __future__ import annotations

from benchmarks.protocol_costs import DAY_MS, costs
from celery_durable.permits.state import QueueSettings

TIMES = QueueSettings("", "")


def test_a_call_without_a_lease_is_asked_for_and_given_back() -> None:
    call = costs().call
    assert (call.reports, call.replies) == (2, 2)


def test_a_permit_in_use_is_reported_twice_in_a_lifetime() -> None:
    held = costs().held
    assert held.reports == held.replies == DAY_MS // (TIMES.reporting_lifetime_ms // 2)


def test_who_waits_repeats_as_seldom_as_the_protocol_lets_it_and_begins_anew_once_a_day() -> None:
    waiting = costs().waiting
    at_least = DAY_MS // TIMES.waiting_repeat_max_ms
    assert at_least < waiting.reports == waiting.replies < at_least + 20


def test_messages_and_rows_have_the_size_of_real_ones() -> None:
    found = costs()
    for exchange in (found.call, found.held, found.waiting):
        assert 200 < exchange.report_bytes / exchange.reports < 400
        assert 200 < exchange.reply_bytes / exchange.replies < 400
    assert 100 < found.holder_row_more < found.holder_row < 400
    assert 100 < found.client_row < 400
