"""What a workflow returns is checked: nothing that cannot be trained on reaches the learner."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from rollout.executor_parts import Rows, Scripted, executor_of, ok, one_batch, uids

from headwater.core.errors import RolloutFailed
from headwater.core.records import DropKind, Score
from headwater.rollout.group import TrajectoryLimits

LIMITS = TrajectoryLimits(vocab_size=32, max_new_tokens=4, max_prompt_tokens=6, get_version=lambda: 2)
NAN, INF = float("nan"), float("inf")


def lengthened(data, num_prompt: int, num_response: int):
    length = num_prompt + num_response
    mask = (0,) * num_prompt + (1,) * num_response
    return replace(
        ok(data),
        tokens=(7,) * length,
        prompt_length=num_prompt,
        loss_mask=mask,
        logprobs=(-0.5,) * length,
        versions=(0,) * length,
    )


WRONG = [
    ({"versions": (-1, 3)}, "policy version 3, but the newest version is 2"),
    ({"versions": (-5, 0)}, "policy version -5; use -1 for tokens that were not sampled"),
    ({"versions": (-1, 0.5)}, "versions contains '0.5' (float)"),
    ({"logprobs": (0.0, NAN)}, "a log-prob of nan"),
    ({"logprobs": (NAN, -0.5)}, "a log-prob of nan"),
    ({"logprobs": (0.0, -INF)}, "a log-prob of -inf"),
    ({"logprobs": (0.0, 0.7)}, "a log-prob of 0.7; log-probs must be finite and at most 0"),
    ({"logprobs": (0.0, "-0.5x")}, "logprobs contains"),
    ({"logprobs": (0.0, None)}, "a log-prob of nan"),
    ({"tokens": (7, 32)}, "token 32 is not in the vocabulary, 0..31"),
    ({"tokens": (-1, 8)}, "token -1 is not in the vocabulary"),
    ({"tokens": (7, 8.5)}, "tokens contains '8.5' (float); all of them must be whole numbers"),
    ({"tokens": (7, None)}, "tokens contains 'None' (NoneType)"),
    ({"tokens": (7, 10**30)}, "tokens contains"),
    ({"tokens": (True, True)}, "tokens contains 'True' (bool)"),
    ({"uid": "row7"}, "returned a trajectory of row row7"),
    ({"reward": "0.5"}, "reward = '0.5' is text"),
    ({"reward": NAN}, "reward = nan: must be a finite number"),
    ({"reward": INF}, "reward = inf: must be a finite number"),
    ({"reward": None}, "reward is a NoneType"),
]


def test_what_cannot_be_trained_on_is_a_counted_failure_with_the_name_of_the_workflow():
    for change, message in WRONG:
        workflow = Scripted(
            lambda data, change=change: replace(ok(data), **(change if data.prompt.uid == "row1" else {}))
        )
        batch = one_batch(workflow, on_failure="drop", limits=LIMITS)
        assert uids(batch) == ["row0", "row2", "row3"], change
        (dropped,) = batch.dropped
        assert dropped.kind.is_failure, change
        assert dropped.kind == (DropKind.FAILED if "reward" in change else DropKind.INVALID), change
        assert dropped.message.startswith("workflow Scripted on row row1 r"), change
        assert message in dropped.message, dropped.message


def test_a_trajectory_of_too_many_tokens_is_refused():
    for lengths, message in [
        ((3, 5), "a response of 5 tokens; rollout.max_new_tokens = 4 is the limit"),
        ((7, 4), "11 tokens; data.max_prompt_tokens + rollout.max_new_tokens = 10 is the limit"),
    ]:
        with pytest.raises(RolloutFailed) as caught:
            one_batch(Scripted(lambda data, lengths=lengths: lengthened(data, *lengths)), limits=LIMITS)
        assert message in str(caught.value)
    one_batch(Scripted(lambda data: lengthened(data, 6, 4)), limits=LIMITS)


def test_one_wrong_sample_is_lost_alone_if_partial_groups_are_allowed():
    def outcome(data):
        return replace(ok(data), tokens=(7, 99 if data.sample == 1 else 8))

    batch = one_batch(Scripted(outcome), num_samples=3, on_failure="drop", allow_partial_groups=True, limits=LIMITS)
    assert [group.num_lost for group in batch.groups] == [1, 1, 1]


def test_every_piece_and_every_evaluation_is_checked():
    with (
        executor_of(Scripted(lambda data: [ok(data), replace(ok(data), tokens=(7, 99))]), limits=LIMITS) as executor,
        pytest.raises(RolloutFailed, match="workflow Scripted on row row0 returned token 99"),
    ):
        executor.rollout_batch(Rows().take(1))


def test_arrays_and_rounding_errors_are_accepted():
    def outcome(data):
        return replace(
            ok(data),
            tokens=np.array([7, 31]),
            logprobs=torch.tensor([0.0, 1e-7]),
            versions=torch.tensor([-1, 2]),
            reward=torch.tensor(0.5),
        )

    (group, *_) = one_batch(Scripted(outcome), limits=LIMITS).groups
    assert type(group.trajectories[0].reward) is float


def test_a_score_is_a_number():
    assert Score(np.float32(0.5)).value == 0.5
    for wrong in ("1.0", b"1", None, NAN, [1.0, 2.0]):
        with pytest.raises((TypeError, ValueError), match=r"reward .*must be a finite number"):
            Score(wrong)
