"""The age of a group, and groups without their old tokens."""

from __future__ import annotations

from headwater.rollout.stale_tokens import oldest_version, without_older
from rollout.executor_parts import draw_of
from rollout.stale_parts import group_of, row

from headwater.rollout.group import Group


def test_a_group_is_as_old_as_its_oldest_trained_token():
    assert oldest_version(group_of(0, (3, 4), (5, 5, 6))) == 3


def test_tokens_that_are_not_trained_have_no_age():
    rows = (row("row0", (2, 4), mask=(0, 1)), row("row0", (-1, 5)))
    assert oldest_version(Group(draw_of(0).prompt, rows)) == 4


def test_a_group_without_trained_tokens_has_no_age():
    assert oldest_version(group_of(0, (-1, -1))) is None
    assert oldest_version(group_of(0)) is None


def test_older_tokens_leave_the_loss_and_nothing_else_changes():
    before = group_of(0, (2, 3, 4, -1, 4), (4,))
    after, count = without_older(before, 4)
    assert count == 2
    assert [each.loss_mask for each in after.trajectories] == [(0, 0, 0, 0, 1, 0, 1), (0, 0, 1)]
    for one, other in zip(before.trajectories, after.trajectories, strict=True):
        assert (one.tokens, one.versions, one.logprobs, one.reward) == (
            other.tokens, other.versions, other.logprobs, other.reward,
        )  # fmt: skip


def test_a_group_without_old_tokens_stays_as_it_is():
    group = group_of(0, (4, 5), (5,))
    assert without_older(group, 4) == (group, 0)


def test_tokens_that_were_out_of_the_loss_already_are_not_counted():
    group = Group(draw_of(0).prompt, (row("row0", (1, 1, 4), mask=(0, 1, 1)),))
    assert without_older(group, 4)[1] == 1
