"""Advantage estimators against verl, and normalisation against AReaL."""

from __future__ import annotations

import torch
from algorithms.oracle import family, tensor
from algorithms.oracle_only import whiten_around_the_mean

from headwater.algorithms.advantages import AdvantageInputs
from headwater.algorithms.advantages.gae import gae
from headwater.algorithms.advantages.gdpo import gdpo
from headwater.algorithms.advantages.gpg import gpg
from headwater.algorithms.advantages.grpo import grpo
from headwater.algorithms.advantages.grpo_passk import grpo_passk
from headwater.algorithms.advantages.opo import opo
from headwater.algorithms.advantages.optimal_token_baseline import optimal_token_baseline
from headwater.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus
from headwater.algorithms.advantages.reinforce_plus_plus_baseline import reinforce_plus_plus_baseline
from headwater.algorithms.advantages.remax import remax
from headwater.algorithms.advantages.rloo import rloo
from headwater.algorithms.masked import masked_mean, masked_sum, masked_var, whiten
from headwater.algorithms.normalize import overlong_penalty
from headwater.config.schema import NormalizationConfig
from headwater.trainer.experience import normalized


def group_numbers(index) -> torch.Tensor:
    numbers = {uid: number for number, uid in enumerate(dict.fromkeys(index))}
    return torch.tensor([numbers[uid] for uid in index])


def advantage_inputs(inputs, **columns) -> AdvantageInputs:
    mask = tensor(inputs["response_mask"])
    groups = group_numbers(inputs["index"]) if "index" in inputs else torch.zeros(len(mask))
    rewards = tensor(inputs["token_level_rewards"]) if "token_level_rewards" in inputs else torch.zeros_like(mask)
    return AdvantageInputs(rewards, mask, groups, **columns)


def outcome(estimator, args, inputs, **settings):
    result = estimator(advantage_inputs(inputs), **settings)
    torch.testing.assert_close(result.returns, result.advantages)
    return {"advantages": result.advantages}


def both(result):
    return {"advantages": result.advantages, "returns": result.returns}


def normalized_by_std(args):
    return {"normalize_by_std": bool(args["norm_adv_by_std_in_grpo"]), "epsilon": args["epsilon"]}


@family("verl_grpo")
@family("verl_grpo_vectorized")
def run_grpo(args, inputs):
    return outcome(grpo, args, inputs, **normalized_by_std(args))


@family("verl_grpo_passk")
def run_grpo_passk(args, inputs):
    return outcome(grpo_passk, args, inputs, **normalized_by_std(args))


@family("verl_rloo")
def run_rloo(args, inputs):
    return outcome(rloo, args, inputs, singleton="score")


@family("verl_rloo_vectorized")
def run_rloo_vectorized(args, inputs):
    return outcome(rloo, args, inputs)


@family("verl_opo")
def run_opo(args, inputs):
    return outcome(opo, args, inputs)


@family("verl_gpg")
def run_gpg(args, inputs):
    return outcome(gpg, args, inputs, divisor=args["f_norm"])


@family("verl_reinforce_pp_baseline")
def run_reinforce_plus_plus_baseline(args, inputs):
    return outcome(reinforce_plus_plus_baseline, args, inputs)


@family("verl_gdpo")
def run_gdpo(args, inputs):
    given = advantage_inputs(inputs, reward_parts=tensor(inputs["rewards"]).T)
    result = gdpo(
        given,
        reward_weights=args["gdpo_reward_weights"],
        normalize_by_std=bool(args["norm_adv_by_std_in_grpo"]),
    )
    return {"advantages": result.advantages}


@family("verl_reinforce_pp")
def run_reinforce_plus_plus(args, inputs):
    return both(reinforce_plus_plus(advantage_inputs(inputs), gamma=args["gamma"]))


@family("verl_remax")
def run_remax(args, inputs):
    return both(remax(advantage_inputs(inputs, baselines=tensor(inputs["reward_baselines"]))))


@family("verl_gae")
def run_gae(args, inputs):
    return both(gae(advantage_inputs(inputs, values=tensor(inputs["values"])), gamma=args["gamma"], lam=args["lam"]))


@family("verl_optimal_token_baseline")
def run_optimal_token_baseline(args, inputs):
    given = advantage_inputs(
        inputs,
        old_logprobs=tensor(inputs["old_log_probs"]),
        sum_pi_squared=tensor(inputs["sum_pi_squared"]),
        weights=tensor(inputs["rollout_is_weights"]) if "rollout_is_weights" in inputs else None,
    )
    return both(
        optimal_token_baseline(
            given,
            skip_masked=args["variant"] == "tir_otb",
            zero_tail=bool(args["handle_zero_tail"]),
            epsilon=args["epsilon"],
        )
    )


@family("verl_masked_stats")
def run_masked_stats(args, inputs):
    values, mask, axis = tensor(inputs["values"]), tensor(inputs["mask"]), args["axis"]
    return {
        "sum": masked_sum(values, mask, axis),
        "mean": masked_mean(values, mask, axis),
        "var": masked_var(values, mask),
        "whiten": (whiten if args["shift_mean"] else whiten_around_the_mean)(values, mask),
    }


def as_areal(values, config, mask=None):
    """AReaL's NormConfig in our settings, through what the loop itself calls; its groups are consecutive rows."""
    settings = NormalizationConfig(
        mean_level=config["mean_level"] or "none",
        std_level=config["std_level"] or "none",
        leave_one_out=bool(config.get("mean_leave1out", False)),
        unbiased=bool(config.get("std_unbiased", True)),
        epsilon=config.get("eps", 1e-5),
    )
    return normalized(values, settings, torch.arange(len(values)) // config.get("group_size", 1), mask)


@family("areal_normalization")
def run_normalization(args, inputs):
    mask = tensor(inputs["mask"]) if "mask" in inputs else None
    return {"y": as_areal(tensor(inputs["x"]), args, mask)}


@family("areal_masked_normalization")
def run_masked_normalization(args, inputs):
    levels = {"mean_level": "batch", "std_level": "batch", "std_unbiased": args["unbiased"], "eps": args["eps"]}
    return {"y": as_areal(tensor(inputs["x"]), levels, tensor(inputs["mask"]))}


@family("areal_overlong_penalty")
def run_overlong_penalty(args, inputs):
    penalty = overlong_penalty(
        torch.tensor(inputs["response_lengths"]),
        max_tokens=args["max_response_length"],
        buffer_tokens=args["overlong_tokens"],
        factor=args["overlong_penalty_factor"],
    )
    return {"rewards": tensor(inputs["rewards"]) + penalty}
