"""Which groups the learner takes, and what happens to tokens that are too old."""

from __future__ import annotations

from rollout.executor_parts import draw_of
from rollout.stale_parts import finished, group_of, row

from headwater.rollout.group import Group
from headwater.rollout.staleness import Selection, all_come_in_time, select

WAYS = ("mask", "drop", "wait")


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


def test_groups_are_taken_in_the_order_they_were_drawn():
    selection = pick([finished(3, (5,)), finished(1, (5,)), finished(2, (5,))])
    assert selection.is_enough
    assert ids(selection.chosen) == [1, 2]


def test_too_few_groups_are_not_enough_unless_no_more_can_come():
    one = [finished(1, (5,))]
    for on_stale in WAYS:
        assert pick(one, on_stale=on_stale) == Selection(), on_stale
        short = pick(one, on_stale=on_stale, may_be_short=True)
        assert (short.is_enough, ids(short.chosen)) == (True, [1]), on_stale
    assert not pick([], may_be_short=True).is_enough


def test_a_group_exactly_at_the_bound_is_taken_unchanged():
    for on_stale in WAYS:
        selection = pick([finished(1, (4, 5)), finished(2, (4,))], on_stale=on_stale)
        assert selection.is_enough, on_stale
        assert (selection.num_masked_tokens, selection.too_old) == (0, []), on_stale
        assert selection.chosen[0].group.trajectories[0].loss_mask == (0, 0, 1, 1), on_stale


def test_mask_removes_old_tokens_from_the_loss():
    selection = pick([finished(1, (3, 3, 4), (4,)), finished(2, (5,))])
    assert ids(selection.chosen) == [1, 2]
    assert selection.num_masked_tokens == 2
    assert [each.loss_mask for each in selection.chosen[0].group.trajectories] == [(0, 0, 0, 0, 1), (0, 0, 1)]


def test_mask_drops_a_group_that_would_have_no_tokens_left():
    selection = pick([finished(1, (3, 3)), finished(2, (5,)), finished(3, (5,))])
    assert (ids(selection.chosen), ids(selection.too_old), selection.num_masked_tokens) == ([2, 3], [1], 0)


def test_drop_discards_groups_with_an_old_token_and_no_others():
    selection = pick([finished(1, (3, 4, 5)), finished(2, (5,)), finished(3, (5,))], on_stale="drop")
    assert (ids(selection.chosen), ids(selection.too_old)) == ([2, 3], [1])
    few = pick([finished(1, (3,)), finished(2, (5,))], on_stale="drop")
    assert (few.is_enough, ids(few.too_old)) == (False, [1]), "old groups are dropped before the batch is complete"
    beyond = pick([finished(1, (5,)), finished(2, (5,)), finished(3, (2,))], on_stale="drop")
    assert beyond.too_old == [], "groups beyond the batch are not looked at"
    untrained = pick([finished(1, (-1,)), finished(2, (5,))], on_stale="drop")
    assert ids(untrained.chosen) == [1, 2], "tokens outside the loss have no age"


def test_wait_is_not_enough_while_a_straggler_would_come_too_late():
    groups = [finished(2, (5,)), finished(3, (5,))]
    # Dispatch 1 started at version 4 and still runs: in the next batch, of version 6, it would be too old.
    assert not pick(groups, on_stale="wait", untaken={1: 4, 2: 5, 3: 5}).is_enough
    assert pick(groups, on_stale="wait", untaken={1: 5, 2: 5, 3: 5}).is_enough


def test_wait_masks_groups_that_are_too_old_anyway():
    selection = pick([finished(1, (3, 5)), finished(2, (5,))], on_stale="wait")
    assert (selection.is_enough, selection.num_masked_tokens) == (True, 1)


def test_all_come_in_time_if_the_batches_until_then_have_room():
    for left, expected in (
        ([], True),
        ([5, 5], True),  # both fit into the batch of version 6
        ([5, 5, 5], False),  # the third would be in that of version 7
        ([4], False),  # the next batch is already too late
        ([6, 5, 5], True),
        ([6, 6, 5, 5], True),
        ([6, 6, 6, 5, 5], False),
    ):
        assert all_come_in_time(left, 2, version=5, max_staleness=1) is expected, left
    assert all_come_in_time([], 2, version=5, max_staleness=0)
    assert not all_come_in_time([5], 2, version=5, max_staleness=0)


def test_a_group_is_as_old_as_its_oldest_trained_token():
    assert group_of(0, (3, 4), (5, 5, 6)).oldest_version() == 3
    untrained = (row("row0", (2, 4), mask=(0, 1)), row("row0", (-1, 5)))
    assert Group(draw_of(0).prompt, untrained).oldest_version() == 4
    assert group_of(0, (-1, -1)).oldest_version() is None
    assert group_of(0).oldest_version() is None


def test_older_tokens_leave_the_loss_and_nothing_else_changes():
    before = group_of(0, (2, 3, 4, -1, 4), (4,))
    after, count = before.without_older(4)
    assert count == 2
    assert [each.loss_mask for each in after.trajectories] == [(0, 0, 0, 0, 1, 0, 1), (0, 0, 1)]
    for one, other in zip(before.trajectories, after.trajectories, strict=True):
        assert (one.tokens, one.versions, one.logprobs, one.reward) == (
            other.tokens, other.versions, other.logprobs, other.reward,
        )  # fmt: skip
    young = group_of(0, (4, 5), (5,))
    assert young.without_older(4) == (young, 0)
    already_out = Group(draw_of(0).prompt, (row("row0", (1, 1, 4), mask=(0, 1, 1)),))
    assert already_out.without_older(4)[1] == 1
