"""What counts against the limit, and what is to be acknowledged (design, section 8)."""

import pytest

from holder_service.account import Client, Entry, Pair
from holder_service.footprint import ENTRIES_MAX, acknowledge, footprint, held, keep, show, wants_ack


def pair(*entries, used=0, claimed=0, **values):
    return Pair(claimed=claimed, used=used, entries=[Entry(*entry) for entry in entries], **values)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (pair(), 0),
        (pair(used=3), 3),
        (pair((1, 2)), 2),
        (pair((1, 2), used=3), 3),
        (pair((1, 5), (2, 1), used=1), 5),
        (pair((1, 5, 12), used=1, claimed=10), 3),
        (pair((1, 2, 12), used=1, claimed=10), 2),
        (pair((1, 5, 10), used=1, claimed=10), 1),
        (pair((1, 5, 7), used=1, claimed=10), 1),
        (pair((1, 5, 11), (2, 3), used=1, claimed=10), 3),
    ],
)
def test_the_formula(known, expected):
    """max of u and, for each entry, min(max(u, p), u + max(0, c - claimed))."""
    assert held(known) == expected


def test_a_grant_counts_and_a_forfeited_client_does_not():
    known = pair((1, 2), offered=3)
    assert footprint(Client("i"), known) == 5
    assert footprint(Client("i", forfeited=True), known) == 0


def test_an_acknowledgement_drops_what_it_superseded():
    known = pair((1, 5), (4, 3), (9, 1))
    acknowledge(known, 3)
    assert len(known.entries) == 3
    acknowledge(known, 5)
    assert [entry.version for entry in known.entries] == [4, 9]
    acknowledge(known, 100)
    assert [entry.version for entry in known.entries] == [9]
    acknowledge(known, 100)
    assert [entry.version for entry in known.entries] == [9]


def test_keeps_lowers_all_that_was_sent():
    known = pair((1, 5), (4, 1), (9, 3))
    assert keep(known, 2)
    assert [entry.permits for entry in known.entries] == [2, 1, 2]
    assert not keep(known, 2)


@pytest.mark.parametrize(
    ("known", "wanted"),
    [
        (pair((1, 2)), False),
        (pair((1, 2), (2, 5)), False),
        (pair((1, 5), (2, 2)), True),
        (pair((1, 5), (2, 2), used=7), True),
        (pair((1, 2), (2, 2, None, 200)), True),
        (pair((1, 0), (2, 2, None, 200)), False),
        (pair((1, 2), (2, 2, 5), claimed=5), True),
        (pair((1, 2), offered=1), True),
    ],
)
def test_what_is_to_be_acknowledged(known, wanted):
    assert wants_ack(Client("i", pairs={"": known})) is wanted


def test_a_client_is_asked_in_a_new_epoch_and_by_version():
    assert wants_ack(Client("i", unknown=True))
    assert wants_ack(Client("i", must_ack=4))
    assert not wants_ack(Client("i"))


def test_what_was_never_acknowledged_is_merged_and_counts_at_least_as_much():
    client, known = Client("i"), pair()
    client.pairs[""] = known
    most = 0
    for version in range(1, 50):
        permits = version * 7 % 11 + 1
        most = max(most, permits)
        show(client, known, version, permits)
        assert held(known) == most
        assert len(known.entries) <= ENTRIES_MAX
    acknowledge(known, 49)
    assert held(known) == 49 * 7 % 11 + 1


def test_within_one_decision_only_the_last_is_sent():
    client, known = Client("i"), pair((1, 2))
    show(client, known, 5, 9)
    show(client, known, 5, 4)
    assert known.entries == [Entry(1, 2), Entry(5, 4)]
    assert client.dirty
