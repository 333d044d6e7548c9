"""Policy losses, value losses, aggregation and KL against verl."""

from __future__ import annotations

import json

import torch
from algorithms.oracle import family, tensor
from algorithms.oracle_only import response_mask

from headwater.algorithms.corrections import Correction, CorrectionInputs, apply_corrections, configured_corrections
from headwater.algorithms.kl import AdaptiveKL, FixedKL, kl_penalty, penalize_rewards
from headwater.algorithms.masked import StepTotals, aggregate, masked_mean
from headwater.algorithms.policy_losses import POLICY_LOSSES, PolicyLossInputs
from headwater.config.arguments import with_arguments
from headwater.config.load import load_config
from headwater.config.schema import AlgorithmConfig
from headwater.core.data_proto import DataProto
from headwater.learner.actor import Actor
from headwater.learner.critic import value_loss
from headwater.learner.packed_module import TokenStatistics, token_logprobs


def totals(args, mask) -> StepTotals:
    here = StepTotals.of(mask)
    return StepTotals(
        num_tokens=args.get("batch_num_tokens") or here.num_tokens,
        num_sequences=args.get("global_batch_size") or here.num_sequences,
        width=args.get("loss_scale_factor") or here.width,
        data_parallel_size=args.get("dp_size") or 1,
        num_rows=here.num_rows,
    )


def clip_bounds(args) -> tuple[float, float]:
    low, high = args.get("clip_ratio_low"), args.get("clip_ratio_high")
    return args["clip_ratio"] if low is None else low, args["clip_ratio"] if high is None else high


def clips(args):
    low, high = clip_bounds(args)
    return {"clip_low": low, "clip_high": high}


def evaluate(name, args, inputs, settings, lower=None):
    """Loss, gradient and diagnostics of a case; ``lower`` names our diagnostic for verl's ``pg_clipfrac_lower``."""
    logprobs = tensor(inputs["log_prob"]).requires_grad_()
    mask = tensor(inputs["response_mask"])
    given = PolicyLossInputs(logprobs, tensor(inputs["old_log_prob"]), tensor(inputs["advantages"]), mask)
    loss = POLICY_LOSSES.resolve(name)(given, **settings)
    if "rollout_is_weights" in inputs:
        loss = loss.weighted(tensor(inputs["rollout_is_weights"]), mask)
    total = aggregate(loss.token_losses, mask, loss.aggregation or args["loss_agg_mode"], totals(args, mask))
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


def rules(names, thresholds) -> list[dict]:
    """verl's list of rejections as the arguments of ``reject``. Its k1 has bounds on π_rollout / π_train."""
    settings = []
    for name, threshold in zip(names.split(","), str(thresholds).split(","), strict=True):
        where, metric = name.rsplit("_", 1)
        level, _, reduction = where.partition("_")
        lower, upper = bounds(threshold)
        given = {"metric": "ratio_reverse" if metric == "k1" else metric, "lower": lower, "upper": upper}
        settings.append(given | ({"level": "sequence", "reduction": reduction} if level == "seq" else {}))
    return settings


def weighing(level, threshold, normalize) -> dict[str, list[dict]]:
    """verl's importance weights as the arguments of ``truncate`` or, with two bounds, ``icepop``."""
    lower, upper = bounds(threshold)
    given = {"level": level, "upper": upper, "normalize": bool(normalize)}
    return {"truncate": [given]} if lower is None else {"icepop": [given | {"lower": lower}]}


def recipe(settings: dict) -> AlgorithmConfig:
    """The section of a recipe with these settings, checked like any recipe."""
    return load_config(
        None, [f"algorithm.{key}={json.dumps(value)}" for key, value in settings.items()]
    ).config.algorithm


def correcting(corrections: dict[str, list[dict]], **settings) -> AlgorithmConfig:
    names = [name for name, each in corrections.items() for _ in each]
    return recipe({"corrections": names, "corrections_args": corrections, **settings})


def corrected(inputs: CorrectionInputs, corrections: dict[str, list[dict]]) -> tuple[Correction, dict[str, float]]:
    """What a step that recomputes log-probs makes of a recipe's corrections, and its metrics."""
    return apply_corrections(configured_corrections(correcting(corrections, old_logprobs="recompute")), inputs)


@family("verl_loss_bypass")
def run_bypass(args, inputs):
    """Bypass mode: the actor corrects in the update itself. verl's ppo_clip reports weights but does not apply them."""
    names = {"ppo_clip": "ppo", "reinforce": "reinforce"}
    arguments = {**clips(args), "dual_clip": args["clip_ratio_c"]} if args["loss_type"] == "ppo_clip" else {}
    corrections = {"reject": rules(args["rollout_rs"], args["rollout_rs_threshold"])} if args["rollout_rs"] else {}
    if args["rollout_is"] and args["loss_type"] == "reinforce":
        corrections |= weighing(args["rollout_is"], args["rollout_is_threshold"], args["rollout_is_batch_normalize"])
    algorithm = correcting(
        corrections,
        old_logprobs="rollout",
        policy_loss=names[args["loss_type"]],
        policy_loss_args=arguments,
        aggregation=args["loss_agg_mode"],
    )
    logprobs, mask = tensor(inputs["log_prob"]).requires_grad_(), tensor(inputs["response_mask"])
    batch = DataProto.from_dict(
        tensors={
            "response_mask": mask,
            "advantages": tensor(inputs["advantages"]),
            "old_logprobs": tensor(inputs["old_log_prob"]),
            "rollout_logprobs": tensor(inputs["old_log_prob"]),
        }
    )
    policy_loss = with_arguments(POLICY_LOSSES, algorithm.policy_loss, algorithm.policy_loss_args, "policy_loss_args")
    actor = Actor(None, policy_loss, algorithm, loss_width=1, corrections=configured_corrections(algorithm))
    loss = actor.token_losses({"logprobs": logprobs, "entropy": torch.zeros_like(mask)}, batch)
    kept = mask if loss.correction is None else loss.correction.mask
    total = aggregate(loss.token_losses, kept, algorithm.aggregation, totals(args, kept))
    total.backward()
    return {"loss": total, "grad_log_prob": logprobs.grad, "ppo_kl": masked_mean(loss.diagnostics["approx_kl"], kept)}


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
