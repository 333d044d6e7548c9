"""Which groups the learner takes, on cases made by hand."""

from __future__ import annotations

import pytest
from rollout.stale_parts import finished

from headwater.rollout.buffer import Selection, all_come_in_time, select


def pick(groups, num_groups=2, *, version=5, max_staleness=1, on_stale="mask", untaken=None, **options) -> Selection:
    running = {each.dispatch.id: each.version for each in groups}
    return select(
        groups,
        num_groups,
        version=version,
        max_staleness=max_staleness,
        on_stale=on_stale,
        untaken=running if untaken is None else untaken,
        **options,
    )


def ids(groups) -> list[int]:
    return [each.dispatch.id for each in groups]


def test_those_drawn_first_are_taken_whoever_finished_first():
    selection = pick([finished(3, (5,)), finished(1, (5,)), finished(2, (5,))])
    assert selection.is_enough
    assert ids(selection.chosen) == [1, 2]


@pytest.mark.parametrize("on_stale", ["mask", "drop", "wait"])
def test_too_few_are_not_enough_unless_there_are_no_more(on_stale):
    one = [finished(1, (5,))]
    assert pick(one, on_stale=on_stale) == Selection()
    short = pick(one, on_stale=on_stale, may_be_short=True)
    assert short.is_enough
    assert ids(short.chosen) == [1]


def test_nothing_at_all_is_never_enough():
    assert not pick([], may_be_short=True).is_enough


@pytest.mark.parametrize("on_stale", ["mask", "drop", "wait"])
def test_a_group_exactly_at_the_bound_is_taken_as_it_is(on_stale):
    selection = pick([finished(1, (4, 5)), finished(2, (4,))], on_stale=on_stale)
    assert selection.is_enough
    assert (selection.num_masked_tokens, selection.too_old) == (0, [])
    assert selection.chosen[0].group.trajectories[0].loss_mask == (0, 0, 1, 1)


def test_mask_takes_old_tokens_out_of_the_loss():
    selection = pick([finished(1, (3, 3, 4), (4,)), finished(2, (5,))])
    assert ids(selection.chosen) == [1, 2]
    assert selection.num_masked_tokens == 2
    assert [each.loss_mask for each in selection.chosen[0].group.trajectories] == [(0, 0, 0, 0, 1), (0, 0, 1)]


def test_mask_gives_up_a_group_of_which_nothing_would_be_left():
    selection = pick([finished(1, (3, 3)), finished(2, (5,)), finished(3, (5,))])
    assert ids(selection.chosen) == [2, 3]
    assert ids(selection.too_old) == [1]
    assert selection.num_masked_tokens == 0


def test_drop_gives_up_a_group_with_one_old_token():
    selection = pick([finished(1, (3, 4, 5)), finished(2, (5,)), finished(3, (5,))], on_stale="drop")
    assert ids(selection.chosen) == [2, 3]
    assert ids(selection.too_old) == [1]


def test_drop_says_so_when_those_left_are_not_enough():
    selection = pick([finished(1, (3,)), finished(2, (5,))], on_stale="drop")
    assert not selection.is_enough
    assert ids(selection.too_old) == [1]


def test_groups_beyond_the_batch_are_left_alone_however_old():
    selection = pick([finished(1, (5,)), finished(2, (5,)), finished(3, (2,))], on_stale="drop")
    assert selection.too_old == []


def test_a_group_whose_tokens_are_all_out_of_the_loss_is_not_too_old():
    selection = pick([finished(1, (-1,)), finished(2, (5,))], on_stale="drop")
    assert ids(selection.chosen) == [1, 2]


def test_wait_is_not_enough_while_a_straggler_would_come_too_late():
    groups = [finished(2, (5,)), finished(3, (5,))]
    # Dispatch 1 started at version 4 and still runs: in the next batch, of version 6, it would be too old.
    assert not pick(groups, on_stale="wait", untaken={1: 4, 2: 5, 3: 5}).is_enough
    assert pick(groups, on_stale="wait", untaken={1: 5, 2: 5, 3: 5}).is_enough


def test_wait_masks_what_is_too_old_all_the_same():
    selection = pick([finished(1, (3, 5)), finished(2, (5,))], on_stale="wait")
    assert selection.is_enough
    assert selection.num_masked_tokens == 1


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        ([], True),
        ([5, 5], True),  # both fit into the batch of version 6
        ([5, 5, 5], False),  # the third would be in that of version 7
        ([4], False),  # already the next batch is too late
        ([6, 5, 5], True),
        ([6, 6, 5, 5], True),
        ([6, 6, 6, 5, 5], False),
    ],
)
def test_all_come_in_time_when_the_batches_until_then_hold_them(left, expected):
    assert all_come_in_time(left, 2, version=5, max_staleness=1) is expected


def test_at_staleness_zero_nothing_may_be_left():
    assert all_come_in_time([], 2, version=5, max_staleness=0)
    assert not all_come_in_time([5], 2, version=5, max_staleness=0)
