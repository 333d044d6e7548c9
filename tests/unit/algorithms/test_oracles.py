"""Our formulas against what verl computes."""

from __future__ import annotations

import pytest
import torch
from algorithms.oracle import cases, check, tensor

from headwater.algorithms.advantages import AdvantageInputs
from headwater.algorithms.advantages.grpo import grpo
from headwater.algorithms.aggregate import token_mean
from headwater.algorithms.masked import masked_mean, masked_sum
from headwater.algorithms.policy_losses import PolicyLossInputs
from headwater.algorithms.policy_losses.ppo import ppo


def ids(case):
    return case["id"]


@pytest.mark.parametrize("case", cases("verl_grpo") + cases("verl_grpo_vectorized"), ids=ids)
def test_grpo(case):
    inputs, args = case["inputs"], case["args"]
    numbers = {uid: number for number, uid in enumerate(dict.fromkeys(inputs["index"]))}
    advantages = grpo(
        AdvantageInputs(
            tensor(inputs["token_level_rewards"]),
            tensor(inputs["response_mask"]),
            torch.tensor([numbers[uid] for uid in inputs["index"]]),
        ),
        normalize_by_std=bool(args["norm_adv_by_std_in_grpo"]),
        epsilon=args["epsilon"],
    )
    check(case, "advantages", advantages)


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in cases("verl_loss_vanilla")
        if case["args"]["loss_agg_mode"] == "token-mean" and "rollout_is_weights" not in case["inputs"]
    ],
    ids=ids,
)
def test_ppo(case):
    inputs, args = case["inputs"], case["args"]
    logprobs = tensor(inputs["log_prob"]).requires_grad_()
    mask = tensor(inputs["response_mask"])
    low, high = (
        args[key] if args[key] is not None else args["clip_ratio"] for key in ("clip_ratio_low", "clip_ratio_high")
    )
    loss = ppo(
        PolicyLossInputs(logprobs, tensor(inputs["old_log_prob"]), tensor(inputs["advantages"]), mask),
        clip_low=low,
        clip_high=high,
        dual_clip=args["clip_ratio_c"],
    )
    total = token_mean(loss.token_losses, mask, float(mask.sum()))
    total.backward()
    check(case, "loss", total)
    check(case, "grad_log_prob", logprobs.grad)
    check(case, "pg_clipfrac", masked_mean(loss.diagnostics["clip_fraction"], mask))
    check(case, "ppo_kl", masked_mean(loss.diagnostics["approx_kl"], mask))


@pytest.mark.parametrize(
    "case", [case for case in cases("verl_agg_loss") if case["args"]["loss_agg_mode"] == "token-mean"], ids=ids
)
def test_token_mean(case):
    losses, mask = tensor(case["inputs"]["loss_mat"]).requires_grad_(), tensor(case["inputs"]["loss_mask"])
    args = case["args"]
    num_tokens = args["batch_num_tokens"] or float(mask.sum())
    # verl multiplies by the data-parallel size because its gradients are averaged over ranks afterwards.
    total = token_mean(losses, mask, num_tokens) * (args["dp_size"] or 1)
    total.backward()
    check(case, "loss", total)
    check(case, "grad_loss_mat", losses.grad)


@pytest.mark.parametrize("case", cases("verl_masked_stats"), ids=ids)
def test_masked_statistics(case):
    values, mask = tensor(case["inputs"]["values"]), tensor(case["inputs"]["mask"])
    check(case, "sum", masked_sum(values, mask, case["args"]["axis"]))
    check(case, "mean", masked_mean(values, mask, case["args"]["axis"]))
