"""Normalised rewards and advantages in the loop, held against what AReaL computes and against hand-made numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import tiny
import torch
from algorithms.oracle import read, tensor
from torch.testing import assert_close
from trainer.experience_parts import batch, policy_logprobs, scores, training, trajectory, with_logprobs

from headwater.rollout.group import Group, RolloutBatch

REWARDS, ADVANTAGES = "algorithm.normalize_rewards", "algorithm.normalize_advantages"
PLAIN_RETURNS = ["algorithm.advantage=reinforce_plus_plus", "algorithm.advantage_args.whitened=false"]


def is_cut_off(case: dict) -> list[bool]:
    """AReaL considers a row without padding as cut off."""
    return [all(row) for row in case["inputs"]["attention_mask"]]


# With a critic, AReaL adds a value after the last token of a row that was cut off, and a run does not. Statistics of a
# batch with such rows cannot be compared.
CASES = [
    case
    for case in read("areal_compute_advantages")["public"]
    if not ("values" in case["inputs"] and case["args"].get("adv_norm") and any(is_cut_off(case)))
]
CUT_OFF = {"stop_reason": "length"}
SHAPING = {"reward_bias": "bias", "reward_scaling": "scale", "reward_clip": "clip"}
GIVEN = {"values": "values", "ref_logp": "reference_logprobs", "prox_logp": "logprobs"}


@dataclass
class Given:
    """A learner whose models have computed these columns."""

    columns: dict[str, torch.Tensor]

    def compute(self, data, what):
        assert set(what) <= set(self.columns)
        return self.columns


def as_settings(key: str, norm: dict | None) -> list[str]:
    if norm is None:
        return []
    given = {"mean_level": norm["mean_level"] or "none", "std_level": norm["std_level"] or "none"}
    if norm.get("mean_leave1out"):
        given["leave_one_out"] = "true"
    return [f"{key}.{name}={value}" for name, value in given.items()]


def as_rollouts(inputs: dict, group_size: int) -> RolloutBatch:
    """The case's rows with their masks, log-probs and rewards; consecutive rows are of one prompt."""
    groups: dict[str, list] = {}
    for row, (mask, rows, logprobs, reward) in enumerate(
        zip(*(inputs[name] for name in ("loss_mask", "attention_mask", "logprobs", "rewards")), strict=True)
    ):
        start, end, uid = mask.index(1), sum(rows), f"row{row // group_size}"
        tokens = tuple(range(10, 10 + start))
        fields = {"loss_mask": tuple(mask[start:end]), "stop_reason": "length" if all(rows) else "stop"}
        made = trajectory(uid, row, tokens, end - start, reward=reward, **fields)
        given = (0.0,) * start + tuple(a * b for a, b in zip(logprobs[start:end], mask[start:end], strict=True))
        groups.setdefault(uid, []).append(replace(made, logprobs=given))
    return RolloutBatch(tuple(Group(tiny.prompt(uid=uid), tuple(each)) for uid, each in groups.items()))


def as_columns(inputs: dict) -> dict[str, torch.Tensor]:
    """What the models of the case computed, ``[samples, response]``. AReaL's columns are one to the left."""
    starts, ends = [mask.index(1) for mask in inputs["loss_mask"]], [sum(rows) for rows in inputs["attention_mask"]]
    width = max(end - start for start, end in zip(starts, ends, strict=True))
    columns = {}
    for name in GIVEN.keys() & inputs.keys():
        columns[GIVEN[name]] = torch.zeros(len(starts), width)
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            columns[GIVEN[name]][row, : end - start] = tensor(inputs[name][row][start - 1 : end - 1])
    if "logprobs" in columns:
        columns["sum_pi_squared"] = torch.zeros_like(columns["logprobs"])
    return columns


def as_overrides(args: dict, inputs: dict) -> list[str]:
    shaping = [f"reward.{name}={args[key]}" for key, name in SHAPING.items()]
    shaping.append(f"reward.zero_unfinished={bool(args['mask_no_eos_with_zero'])}".lower())
    if args.get("overlong_reward_penalty"):
        shaping += [f"reward.overlong_tokens={args['overlong_tokens']}"]
        shaping += [f"reward.overlong_penalty={args['overlong_penalty_factor']}"]
        shaping += [f"rollout.max_new_tokens={args['max_new_tokens']}"]
    if "ref_logp" in inputs:
        shaping += [f"algorithm.kl_in_reward={args['kl_ctl']}", f"algorithm.kl_estimator={args['kl_estimator']}"]
    if "prox_logp" in inputs:
        shaping.append("algorithm.old_logprobs=recompute")
    returns = PLAIN_RETURNS
    if "values" in inputs:
        gae = f"{{gamma: {args['discount']}, lam: {args['gae_lambda']}, whitened: false}}"
        returns = ["algorithm.advantage=gae", f"algorithm.advantage_args={gae}", "critic.enabled=true"]
    normalizations = as_settings(REWARDS, args.get("reward_norm")) + as_settings(ADVANTAGES, args.get("adv_norm"))
    return [*returns, *normalizations, *shaping]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_a_run_gives_the_advantages_of_areal(case):
    args, inputs = case["args"], case["inputs"]
    rollouts = as_rollouts(inputs, (args.get("reward_norm") or {}).get("group_size", 2))
    maker = training(*as_overrides(args, inputs)).experience
    made = replace(maker, learner=Given(as_columns(inputs))).make(rollouts, version=0).data.batch
    # AReaL's columns are the positions that predict a token, one to the left of it.
    trained = tensor(inputs["loss_mask"]).roll(-1, dims=1) != 0
    ours, compared = made["response_mask"] != 0, torch.ones(len(trained), 1, dtype=torch.bool)
    if "values" in inputs:
        compared = ~torch.tensor(is_cut_off(case))[:, None]
    if args.get("overlong_reward_penalty"):
        # AReaL counts only trained tokens. A run counts all that rollout.max_new_tokens limits.
        lengths = torch.tensor([len(each.response_tokens) for each in rollouts.trajectories])
        compared = compared & (lengths == ours.sum(dim=1))[:, None]
    assert compared.any()
    for name in ("advantages", "returns"):
        expected = tensor(case["expected"][name])[trained & compared]
        assert_close(made[name][ours & compared], expected, atol=1e-5, rtol=1e-5)


def test_normalised_scores_stand_where_the_rewards_did_and_before_the_divergence():
    """Rewards 1 and 3 minus the mean of the other are -2 and 2."""
    rollouts = batch(num_groups=1, num_samples=2)
    rewards = (1.0, 3.0)
    (group,) = rollouts.groups
    samples = [replace(each, reward=reward) for each, reward in zip(group.trajectories, rewards, strict=True)]
    parts = training(
        *PLAIN_RETURNS, f"{REWARDS}.mean_level=group", f"{REWARDS}.leave_one_out=true", "algorithm.kl_in_reward=0.1"
    )
    made = parts.experience.make(RolloutBatch((replace(group, trajectories=tuple(samples)),)), version=0).data.batch
    divergence = made["rewards"] - torch.tensor([[-2.0, 0.0], [0.0, 2.0]])
    assert (divergence != 0).equal(made["response_mask"] != 0)
    assert divergence.abs().max() < 1.0


def test_rewards_of_turns_keep_their_places():
    """Scores 1 and 3 less their mean of 2, over a deviation of sqrt(2); the turns end at the first and last token."""
    prompt, mask = tiny.prompt(), (1, 0, 1, 1)
    samples = [
        trajectory("row", sample, prompt.tokens, 4, loss_mask=mask, reward=sum(turns), turn_rewards=turns)
        for sample, turns in enumerate([(1.0, 0.0), (1.0, 2.0)])
    ]
    parts = training(*PLAIN_RETURNS, f"{REWARDS}={{mean_level: group, std_level: group}}")
    made = parts.experience.make(RolloutBatch((Group(prompt, tuple(samples)),)), version=0).data.batch
    expected = torch.tensor([[1.0, 0.0, 0.0, -2.0], [1.0, 0.0, 0.0, 0.0]]) / 2**0.5
    assert_close(made["rewards"], expected, atol=1e-4, rtol=0.0)


def test_scores_are_scaled_and_clipped_where_they_are():
    """Scores 1 and 3: (1 - 2)·2 = -2 and (3 - 2)·2 = 2, clipped to ±1.5; the turns before are only scaled."""
    prompt, mask = tiny.prompt(), (1, 0, 1, 1)
    samples = [
        trajectory("row", sample, prompt.tokens, 4, loss_mask=mask, reward=sum(turns), turn_rewards=turns, **fields)
        for sample, (turns, fields) in enumerate([((1.0, 0.0), {}), ((1.0, 2.0), {}), ((1.0, 2.0), CUT_OFF)])
    ]
    parts = training(*PLAIN_RETURNS, "reward={bias: -2, scale: 2, clip: 1.5, zero_unfinished: true}")
    made = parts.experience.make(RolloutBatch((Group(prompt, tuple(samples)),)), version=0).data.batch
    assert made["rewards"].tolist() == [[2.0, 0.0, 0.0, -3.5], [2.0, 0.0, 0.0, -0.5], [0.0] * 4]


def test_a_sample_that_is_left_alone_of_its_group_counts_for_nothing():
    pair, alone = batch(num_groups=2, num_samples=2).groups
    alone = replace(alone, trajectories=(replace(alone.trajectories[0], reward=0.2),))
    settings = f"{REWARDS}={{mean_level: group, std_level: group, leave_one_out: true}}"
    made = training(*PLAIN_RETURNS, settings).experience.make(RolloutBatch((pair, alone)), version=0).data.batch
    assert made["rewards"][:2].sum(dim=1).abs().min() > 0
    assert not made["rewards"][2].any()


def test_advantages_of_an_estimator_are_normalised_over_all_trained_tokens():
    """Of grpo without its deviation: what is left is the same numbers on the scale of the batch."""
    settings = ["algorithm.advantage_args.normalize_by_std=false"]
    plain = training(*settings).experience.make(batch(), version=0).data.batch
    made = training(*settings, f"{ADVANTAGES}.std_level=batch", f"{ADVANTAGES}.mean_level=batch")
    columns = made.experience.make(batch(), version=0).data.batch
    kept = columns["response_mask"] != 0
    values = plain["advantages"][kept]
    assert_close(columns["advantages"][kept], (values - values.mean()) / (values.std() + 1e-5))
    assert not columns["advantages"][~kept].any()
    assert_close(columns["returns"], plain["returns"])
    assert_close(columns["rewards"].sum(dim=1), scores(batch()))


def test_pieces_of_an_episode_share_its_weight_in_the_statistics_and_the_loss():
    """Scores 1 and, in three pieces, -1: the mean over episodes is 0, and their deviation sqrt(2)."""
    prompt = tiny.prompt()
    pieces = [
        trajectory("row", sample, prompt.tokens, 2, reward=reward)
        for sample, reward in [(0, 1.0), (1, -1.0), (1, -1.0), (1, -1.0)]
    ]
    # Two tokens each: four in all count, of which one is taken off for the unbiased deviation.
    parts = training(*PLAIN_RETURNS, f"{ADVANTAGES}={{mean_level: batch, std_level: batch}}")
    made = parts.experience.make(RolloutBatch((Group(prompt, tuple(pieces)),)), version=0).data.batch
    expected = torch.tensor([[1.0], [-1.0], [-1.0], [-1.0]]).expand(4, 2) * (3 / 4) ** 0.5
    assert_close(made["advantages"], expected, atol=1e-4, rtol=0.0)
    assert_close(made["sequence_weights"], torch.tensor([1.0, *[1 / 3] * 3]))
    whole = parts.experience.make(batch(), version=0).data.batch
    assert "sequence_weights" not in whole


def test_the_weights_of_pieces_count_only_what_corrections_kept():
    prompt = tiny.prompt()
    pieces = [trajectory("row", sample, prompt.tokens, 2) for sample in (0, 1, 1)]
    rollouts = RolloutBatch((Group(prompt, tuple(pieces)),))
    parts = training("algorithm.corrections=[m2po]", "algorithm.old_logprobs=recompute")
    logprobs = policy_logprobs(parts, rollouts)
    logprobs[1] -= 5.0  # the first piece of the second episode is rejected
    made = parts.experience.make(with_logprobs(rollouts, logprobs), version=0).data.batch
    assert made["response_mask"].sum(dim=1).tolist() == [2.0, 0.0, 2.0]
    assert made["sequence_weights"][[0, 2]].tolist() == [1.0, 1.0]
