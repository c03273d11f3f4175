"""Two copies of an account's commands: the newest of each sender, kind and target counts (design, section 8)."""

from celery_durable.permits.messages import LimitMirror
from holder_service import mirrors, semaphore


def mirror(**values):
    return LimitMirror(account="acme", **values)


def test_of_each_kind_and_target_the_newer_command_counts():
    known = mirror(
        limit=3,
        group_limits={"wf-1": 1, "wf-2": 2},
        seqs={"ops/SetLimit": 5, "ops/SetLimit/wf-1": 6, "ops/SetLimit/wf-2": 2, "ops/Pause": 1},
    )
    found = mirror(
        limit=9,
        group_limits={"wf-1": 9, "wf-3": 3},
        paused=True,
        seqs={"ops/SetLimit": 4, "ops/SetLimit/wf-1": 6, "ops/SetLimit/wf-2": 7, "x/SetLimit/wf-3": 1, "ops/Pause": 8},
    )
    merged = mirror(
        limit=3,
        group_limits={"wf-1": 1, "wf-3": 3},
        paused=True,
        seqs={
            "ops/SetLimit": 5,
            "ops/SetLimit/wf-1": 6,
            "ops/SetLimit/wf-2": 7,
            "x/SetLimit/wf-3": 1,
            "ops/Pause": 8,
        },
    )
    assert mirrors.merge(known, found) == merged
    assert mirrors.merge(merged, found) == mirrors.merge(merged, known) == merged


def test_a_command_that_took_a_limit_away_counts_too():
    known = mirror(limit=3, group_limits={"": 1}, paused=True, seqs={"ops/SetLimit": 1, "ops/SetLimit/": 1})
    found = mirror(seqs={"ops/SetLimit": 2, "ops/SetLimit/": 2, "ops/Pause": 3})
    assert mirrors.merge(known, found) == found


def test_a_groups_name_may_look_like_another_command():
    known = mirror(group_limits={"x/Pause": 2}, paused=True, seqs={"ops/SetLimit/x/Pause": 1})
    found = mirror(group_limits={"x/Pause": 4}, seqs={"ops/SetLimit/x/Pause": 2})
    assert mirrors.merge(known, found) == mirror(group_limits={"x/Pause": 4}, paused=True, seqs=found.seqs)


def test_a_new_epoch_takes_over_newer_commands_but_no_forfeit():
    """A forfeit changes what clients hold, which only its message in the accounts topic can repeat."""
    state = semaphore.new_account("acme", 1_000, mirror(limit=3, seqs={"ops/SetLimit": 1, "ops/Forfeit/a": 1}))
    found = mirror(limit=2, paused=True, seqs={"ops/SetLimit": 2, "ops/Pause": 3, "ops/Forfeit/a": 4})
    state = semaphore.new_epoch(state, 2_000, found)
    assert (state.limit, state.paused, state.epoch) == (2, True, 2_000)
    assert state.seqs == {"ops/SetLimit": 2, "ops/Pause": 3, "ops/Forfeit/a": 1}
