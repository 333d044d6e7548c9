"""Policy losses, value losses, aggregation and KL against verl."""

from __future__ import annotations

import torch
from algorithms.oracle import family, tensor
from algorithms.oracle_only import response_mask

from headwater.algorithms.corrections import CorrectionInputs, combine
from headwater.algorithms.corrections.icepop import icepop
from headwater.algorithms.corrections.reject import reject
from headwater.algorithms.corrections.truncate import truncate
from headwater.algorithms.kl import AdaptiveKL, FixedKL, kl_penalty, penalize_rewards
from headwater.algorithms.masked import StepTotals, aggregate, masked_mean
from headwater.algorithms.policy_losses import POLICY_LOSSES, PolicyLossInputs
from headwater.algorithms.value_loss import value_loss
from headwater.learner.packed_module import TokenStatistics, token_logprobs


def totals(args, mask) -> StepTotals:
    here = StepTotals.of(mask)
    return StepTotals(
        num_tokens=args.get("batch_num_tokens") or here.num_tokens,
        num_sequences=args.get("global_batch_size") or here.num_sequences,
        width=args.get("loss_scale_factor") or here.width,
        data_parallel_size=args.get("dp_size") or 1,
    )


def clip_bounds(args) -> tuple[float, float]:
    low, high = args.get("clip_ratio_low"), args.get("clip_ratio_high")
    return args["clip_ratio"] if low is None else low, args["clip_ratio"] if high is None else high


def clips(args):
    low, high = clip_bounds(args)
    return {"clip_low": low, "clip_high": high}


def evaluate(name, args, inputs, settings, lower=None, weights=None):
    """Loss, gradient and diagnostics of a case; ``lower`` names our diagnostic for verl's ``pg_clipfrac_lower``."""
    logprobs = tensor(inputs["log_prob"]).requires_grad_()
    mask = tensor(inputs["response_mask"])
    given = PolicyLossInputs(logprobs, tensor(inputs["old_log_prob"]), tensor(inputs["advantages"]), mask)
    loss = POLICY_LOSSES.resolve(name)(given, **settings)
    if weights is None:
        weights = tensor(inputs["rollout_is_weights"]) if "rollout_is_weights" in inputs else torch.ones_like(mask)
    losses = loss.weighted(weights, mask).token_losses
    total = aggregate(losses, mask, loss.aggregation or args["loss_agg_mode"], totals(args, mask))
    total.backward()

    def mean(name):
        return masked_mean(loss.diagnostics[name], mask) if name in loss.diagnostics else torch.zeros(())

    return {
        "loss": total,
        "grad_log_prob": logprobs.grad,
        "pg_clipfrac": mean("clip_fraction"),
        "ppo_kl": mean("approx_kl"),
        "pg_clipfrac_lower": mean(lower),
    }


def only(outputs, *names):
    return {name: outputs[name] for name in names}


@family("verl_loss_vanilla")
def run_ppo(args, inputs):
    return evaluate("ppo", args, inputs, {**clips(args), "dual_clip": args["clip_ratio_c"]}, "dual_clip_fraction")


@family("verl_loss_gspo")
def run_gspo(args, inputs):
    return evaluate("gspo", args, inputs, clips(args))


@family("verl_loss_cispo")
def run_cispo(args, inputs):
    return evaluate("cispo", args, inputs, clips(args))


@family("verl_loss_sapo")
def run_sapo(args, inputs):
    settings = {"tau_positive": args["tau_pos"], "tau_negative": args["tau_neg"]}
    return evaluate("sapo", args, inputs, settings)


@family("verl_loss_geo_mean")
def run_geo_mean(args, inputs):
    # verl counts rows without a trained token among those it averages over.
    args = {**args, "global_batch_size": len(inputs["response_mask"])}
    return evaluate("geo_mean", args, inputs, clips(args), "clip_fraction_negative")


@family("verl_loss_gpg")
def run_gpg(args, inputs):
    return only(evaluate("gpg", args, inputs, {}), "loss", "grad_log_prob")


@family("verl_loss_reinforce")
def run_reinforce(args, inputs):
    return only(evaluate("reinforce", args, inputs, {}), "loss", "grad_log_prob", "ppo_kl")


@family("verl_loss_dro")
def run_dro(args, inputs):
    return only(evaluate("dro", args, inputs, {"beta": args["dro_beta"]}), "loss", "grad_log_prob", "ppo_kl")


@family("verl_loss_clip_cov")
def run_clip_cov(args, inputs):
    settings = {
        **clips(args),
        "fraction": args["clip_cov_ratio"],
        "lower": args["clip_cov_lb"],
        "upper": args["clip_cov_ub"],
    }
    outputs = evaluate("clip_cov", args, inputs, settings)
    return only(outputs, "loss", "grad_log_prob", "ppo_kl", "pg_clipfrac")


@family("verl_loss_kl_cov")
def run_kl_cov(args, inputs):
    settings = {"fraction": args["kl_cov_ratio"], "coefficient": args["ppo_kl_coef"]}
    return only(evaluate("kl_cov", args, inputs, settings), "loss", "grad_log_prob", "ppo_kl")


def run_dppo(name, args, inputs):
    low, high = clip_bounds(args)
    settings = {"bound_low": low, "bound_high": high, "max_ratio": args["clip_ratio_c"]}
    return evaluate(name, args, inputs, settings, "truncated_fraction")


@family("verl_loss_dppo_tv")
def run_dppo_tv(args, inputs):
    return run_dppo("dppo_tv", args, inputs)


@family("verl_loss_dppo_kl")
def run_dppo_kl(args, inputs):
    return run_dppo("dppo_kl", args, inputs)


def bounds(threshold) -> tuple[float | None, float]:
    """verl writes a pair of bounds as 'low_high'."""
    low, _, high = str(threshold).rpartition("_")
    return (float(low) if low else None), float(high)


def importance(inputs: CorrectionInputs, level, threshold, normalize):
    lower, upper = bounds(threshold)
    if lower is None:
        return truncate(inputs, level=level, upper=upper, normalize=bool(normalize))
    return icepop(inputs, level=level, lower=lower, upper=upper, normalize=bool(normalize))


def rejection(inputs: CorrectionInputs, names, thresholds):
    """verl's list of rejections. Its k1 bounds are on rollout/train, ours on train/rollout."""
    corrections = {}
    for name, threshold in zip(names.split(","), str(thresholds).split(","), strict=True):
        where, metric = name.rsplit("_", 1)
        level, _, reduction = where.partition("_")
        lower, upper = bounds(threshold)
        settings = {"metric": metric, "upper": upper}
        if metric == "k1":
            settings = {"metric": "ratio", "lower": 1 / upper, "upper": 1 / (lower or 1 / upper)}
        if level == "seq":
            settings |= {"level": "sequence", "reduction": reduction}
        corrections[name] = reject(inputs, **settings)
    return combine(corrections)


@family("verl_loss_bypass")
def run_bypass(args, inputs):
    """Bypass mode: the rollout's log-probs are the old ones, corrections are of the policy being trained."""
    mask = tensor(inputs["response_mask"])
    given = CorrectionInputs(tensor(inputs["log_prob"]), tensor(inputs["old_log_prob"]), mask)
    weights, kept = torch.ones_like(mask), mask
    if args["rollout_rs"]:
        kept = rejection(given, args["rollout_rs"], args["rollout_rs_threshold"]).mask
    if args["rollout_is"] and args["loss_type"] == "reinforce":
        weights = importance(
            given, args["rollout_is"], args["rollout_is_threshold"], args["rollout_is_batch_normalize"]
        ).weights
    inputs = {**inputs, "response_mask": kept.tolist()}
    name, settings = "reinforce", {}
    if args["loss_type"] == "ppo_clip":
        name, settings = "ppo", {**clips(args), "dual_clip": args["clip_ratio_c"]}
    outputs = evaluate(name, args, inputs, settings, weights=weights)
    return only(outputs, "loss", "grad_log_prob", "ppo_kl")


@family("verl_agg_loss")
def run_aggregate(args, inputs):
    losses, mask = tensor(inputs["loss_mat"]).requires_grad_(), tensor(inputs["loss_mask"])
    total = aggregate(losses, mask, args["loss_agg_mode"], totals(args, mask))
    total.backward()
    return {"loss": total, "grad_loss_mat": losses.grad}


@family("verl_value_loss")
def run_value_loss(args, inputs):
    predicted, mask = tensor(inputs["vpreds"]).requires_grad_(), tensor(inputs["response_mask"])
    loss = value_loss(
        predicted, tensor(inputs["values"]), tensor(inputs["returns"]), mask, clip=args["cliprange_value"]
    )
    total = aggregate(loss.token_losses, mask, args["loss_agg_mode"], totals(args, mask))
    total.backward()
    clipped = masked_mean(loss.diagnostics["clip_fraction"], mask)
    return {"vf_loss": total, "vf_clipfrac": clipped, "grad_vpreds": predicted.grad}


def statistics_of(logits, tokens) -> TokenStatistics:
    """What the learner computes from hidden states, of which these are the logits as they are."""
    flat = logits.flatten(0, -2)
    found = token_logprobs(flat, torch.eye(flat.shape[1]), None, tokens.flatten(), 1.0)
    return TokenStatistics(*(each.view(logits.shape[:-1]) for each in found))


@family("verl_entropy_loss")
def run_entropy_loss(args, inputs):
    logits, mask = tensor(inputs["logits"]).requires_grad_(), tensor(inputs["response_mask"])
    entropy = statistics_of(logits, torch.zeros(mask.shape, dtype=torch.int64)).entropy
    total = aggregate(entropy, mask, args["loss_agg_mode"], totals(args, mask))
    total.backward()
    return {"entropy_loss": total, "token_entropy": entropy, "grad_logits": logits.grad}


@family("verl_logprobs_from_logits")
def run_logprobs(args, inputs):
    logits = tensor(inputs["logits"]).requires_grad_()
    statistics = statistics_of(logits, torch.tensor(inputs["labels"]))
    statistics.logprobs.sum().backward()
    return {**statistics._asdict(), "grad_logits": logits.grad}


OUR_KL_NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def kl_kind(name: str) -> str:
    plain = name.removesuffix("+")
    return OUR_KL_NAMES.get(plain, plain) + name[len(plain) :]


@family("verl_kl_penalty")
def run_kl_penalty(args, inputs):
    logprobs = tensor(inputs["logprob"]).requires_grad_()
    kl = kl_penalty(logprobs, tensor(inputs["ref_logprob"]), kl_kind(args["kind"]))
    kl.sum().backward()
    return {"kl": kl, "grad_logprob": logprobs.grad}


def controller(args):
    if args["type"] == "fixed":
        return FixedKL(args["kl_coef"])
    return AdaptiveKL(args["kl_coef"], target=args["target_kl"], horizon=args["horizon"])


@family("verl_kl_controller")
def run_kl_controller(args, inputs):
    steered, values = controller(args), []
    for kl, num_samples in zip(inputs["current_kl"], inputs["n_steps"], strict=True):
        steered.update(kl, num_samples)
        values.append(steered.coefficient)
    return {"values": values}


@family("verl_apply_kl_penalty")
def run_apply_kl_penalty(args, inputs):
    steered = controller(args)
    used = steered.coefficient
    penalized = penalize_rewards(
        tensor(inputs["token_level_scores"]),
        tensor(inputs["old_log_probs"]),
        tensor(inputs["ref_log_prob"]),
        tensor(inputs["response_mask"]),
        kind=kl_kind(args["kl_penalty"]),
        coefficient=used,
    )
    steered.update(penalized.kl, len(penalized.rewards))
    return {
        "token_level_rewards": penalized.rewards,
        "current_kl": penalized.kl,
        "coeff_used": used,
        "coeff_after": steered.coefficient,
    }


@family("verl_response_mask")
def run_response_mask(args, inputs):
    ends = args["eos_token"] if isinstance(args["eos_token"], list) else [args["eos_token"]]
    return {"mask": response_mask(torch.tensor(inputs["response_id"]), ends)}
