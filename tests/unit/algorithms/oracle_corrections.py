"""Corrections for off-policy data against verl and AReaL, and AReaL's losses."""

from __future__ import annotations

import torch
from algorithms.oracle import family, tensor
from algorithms.oracle_losses import corrected, rules, weighing
from algorithms.oracle_only import areal_value_clip_mask, dpo, ipo, linear_proximal

from headwater.algorithms.corrections import CorrectionInputs, combine, correction_metrics, mean_weight
from headwater.algorithms.corrections.m2po import m2po
from headwater.algorithms.corrections.reject import reject
from headwater.algorithms.corrections.truncate import truncate
from headwater.algorithms.diagnostics import offpolicy_metrics, weight_metrics
from headwater.algorithms.kl import kl_penalty
from headwater.algorithms.masked import StepTotals, aggregate, keep, masked_mean
from headwater.algorithms.policy_losses import PolicyLossInputs
from headwater.algorithms.policy_losses.decoupled import decoupled
from headwater.algorithms.policy_losses.sapo import sapo
from headwater.algorithms.proximal import loglinear
from headwater.algorithms.value_loss import value_loss


def as_rollout(inputs) -> CorrectionInputs:
    """verl's vectors give the log ratio itself."""
    log_ratio = tensor(inputs["log_ratio"])
    return CorrectionInputs(log_ratio, torch.zeros_like(log_ratio), tensor(inputs["response_mask"]))


VERL_METRICS = {
    "effective_sample_size": "eff_sample_size",
    "weight_max": "max",
    "weight_min": "min",
    "weight_mean": "mean",
    "weight_std": "std",
    "sequence_weight_mean": "seq_mean",
    "sequence_weight_std": "seq_std",
    "sequence_weight_max": "seq_max",
    "sequence_weight_min": "seq_min",
    "sequence_weight_max_deviation": "seq_max_deviation",
    "ratio_max": "max",
    "ratio_min": "min",
    "ratio_high_fraction": "ratio_fraction_high",
    "ratio_low_fraction": "ratio_fraction_low",
    "sequence_ratio_high_fraction": "seq_fraction_high",
    "sequence_ratio_low_fraction": "seq_fraction_low",
}
EXTREMES = ("ratio_max", "ratio_min")
"""For sequences verl reports the range of the ratios, for tokens that of the weights."""
RANGE_METRICS = [name for name in VERL_METRICS if "ratio" in name]


@family("verl_rollout_is_weights")
def run_importance_weights(args, inputs):
    given, level = as_rollout(inputs), args["rollout_is"]

    def apply(normalize):
        return corrected(given, weighing(level, args["rollout_is_threshold"], normalize))

    plain = apply(normalize=False)
    (name, correction), metrics = *plain.items(), correction_metrics(plain, given.mask)
    measured = weight_metrics(correction.weights, given.mask) | {
        metric: metrics[f"{name}/{metric}"] for metric in RANGE_METRICS if level == "sequence" or metric not in EXTREMES
    }
    shown = {f"rollout_is_{VERL_METRICS[metric]}": value for metric, value in measured.items()}
    if name == "icepop":
        shown["rollout_is_oob_ratio"] = masked_mean(correction.diagnostics["outside_fraction"], given.mask)
    if args["rollout_is_batch_normalize"]:
        shown["rollout_is_batch_norm_factor"] = mean_weight(correction.weights, given.mask, level)
    (weighed,) = apply(args["rollout_is_batch_normalize"]).values()
    return {"rollout_is_weights": weighed.weights, "metrics": shown}


@family("verl_rollout_rejection")
def run_rejection(args, inputs):
    given = as_rollout(inputs)
    found = corrected(given, {"reject": rules(args["rollout_rs"], args["rollout_rs_threshold"])})
    metrics = correction_metrics(found, given.mask)
    return {
        "modified_response_mask": combine(found).mask,
        "masked_fraction": metrics["rejected_fraction"],
        "seq_masked_fraction": metrics["rejected_sequence_fraction"],
    }


@family("verl_offpolicy_metrics")
def run_offpolicy_metrics(args, inputs):
    columns = (tensor(inputs[name]) for name in ("old_log_prob", "rollout_log_prob", "response_mask"))
    return {"metrics": offpolicy_metrics(*columns)}


class Layout:
    """AReaL gives some cases packed, with the sequences end to end; we only have rows."""

    def __init__(self, inputs) -> None:
        self.cuts = inputs.get("cu_seqlens")

    def rows(self, values) -> torch.Tensor:
        flat = tensor(values)
        if self.cuts is None:
            return flat
        parts = [flat[start:end] for start, end in zip(self.cuts, self.cuts[1:], strict=False)]
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        if self.cuts is None:
            return rows
        lengths = [end - start for start, end in zip(self.cuts, self.cuts[1:], strict=False)]
        return torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])


def areal_metric(name: str) -> str:
    """Their k3 is of the inverse ratio."""
    return {"ratio": "ratio", "kl_k1": "k1", "kl_k2": "k2", "kl_k3": "k3_reverse"}[name]


@family("areal_rejection_sampling")
def run_areal_rejection(args, inputs):
    layout = Layout(inputs)
    given = CorrectionInputs(
        *(layout.rows(inputs[name]) for name in ("proximal_logprobs", "old_logprobs", "loss_mask"))
    )
    if args["action"] == "mask":
        correction = reject(
            given,
            level=args["level"],
            metric=areal_metric(args["metric"]),
            reduction=args.get("agg", "mean"),
            lower=args.get("lower"),
            upper=args["upper"],
            weighted=True,
            max_log_ratio=None,
        )
        filtered = correction.diagnostics["rejected_fraction"]
    else:
        level = "token" if args["level"] == "token" else "geometric"
        correction = truncate(
            given, level=level, lower=args.get("lower") or 0.0, upper=args["upper"], max_log_ratio=None
        )
        filtered = correction.diagnostics["truncated_fraction"]
    return {
        "loss_mask": layout.back(correction.mask),
        "behave_imp_weight": layout.back(correction.weights),
        "filtered_fraction": masked_mean(filtered, given.mask),
    }


def decoupled_settings(args):
    settings = {
        "clip_low": args["eps_clip"],
        "clip_high": args["eps_clip"] if args["eps_clip_higher"] is None else args["eps_clip_higher"],
        "dual_clip": args["c_clip"],
        "ratio_level": args["importance_sampling_level"],
        "weight": "none",
    }
    config = args["rejection_sampling"]
    if config is not None:
        settings |= {
            "weight": config["action"],
            "weight_level": config["level"],
            "metric": areal_metric(config["metric"]),
            "reduction": config.get("agg", "mean"),
            "lower": config.get("lower"),
            "upper": config["upper"],
        }
    return settings


@family("areal_ppo_actor_loss")
def run_decoupled(args, inputs):
    layout = Layout(inputs)
    logprobs, proximal, behaviour, advantages, mask = (
        layout.rows(inputs[name])
        for name in ("logprobs", "proximal_logprobs", "old_logprobs", "advantages", "loss_mask")
    )
    logprobs.requires_grad_()
    loss = decoupled(
        PolicyLossInputs(logprobs, proximal, advantages, mask, rollout_logprobs=behaviour), **decoupled_settings(args)
    )
    total = aggregate(loss.token_losses, mask, "token-mean", StepTotals.of(mask))
    total.backward()
    left = mask - loss.diagnostics.get("rejected_fraction", torch.zeros_like(mask))
    zeros = torch.zeros_like(mask)
    outputs = {
        "loss": total,
        "grad_logprobs": layout.back(logprobs.grad),
        "importance_weight": layout.back(keep(loss.diagnostics["ratio"], left)),
        "clip_mask": layout.back(keep(loss.diagnostics["clip_fraction"], left)),
        "dual_clip_mask": layout.back(keep(loss.diagnostics.get("dual_clip_fraction", zeros), left)),
    }
    if args["rejection_sampling"] is not None:
        filtered = loss.diagnostics.get("rejected_fraction", loss.diagnostics.get("truncated_fraction"))
        outputs |= {
            "behave_imp_weight": layout.back(loss.diagnostics["behaviour_weight"]),
            "behave_mask": layout.back(left),
            "behave_approx_kl": layout.back(keep(proximal - behaviour, left)),
            "filtered_fraction": masked_mean(filtered, mask),
        }
    return outputs


@family("areal_sapo_loss")
def run_sapo(args, inputs):
    layout = Layout(inputs)
    logprobs, old, advantages, mask = (
        layout.rows(inputs[name]) for name in ("logprobs", "old_logprobs", "advantages", "loss_mask")
    )
    logprobs.requires_grad_()
    loss = sapo(
        PolicyLossInputs(logprobs, old, advantages, mask),
        tau_positive=args["tau_pos"],
        tau_negative=args["tau_neg"],
        ratio_level=args["importance_sampling_level"],
        aggregation=None,
        max_log_ratio=None,
    )
    total = aggregate(loss.token_losses, mask, "token-mean", StepTotals.of(mask))
    total.backward()
    return {
        "loss": total,
        "grad_logprobs": layout.back(logprobs.grad),
        "soft_gate": layout.back(loss.diagnostics["soft_gate"]),
    }


@family("areal_m2po_mask")
def run_m2po(args, inputs):
    given = CorrectionInputs(*(tensor(inputs[name]) for name in ("prox_logp", "old_logp", "loss_mask")))
    return {"loss_mask": m2po(given, threshold=args["m2_threshold"]).mask}


@family("areal_kl_estimator")
def run_kl_estimator(args, inputs):
    clamp = "all" if args["apply_clamp"] else "none"
    return {
        "kl": kl_penalty(tensor(inputs["log_probs"]), tensor(inputs["log_probs_base"]), args["kl_estimator"], clamp)
    }


@family("areal_prox_logp")
def run_proximal(args, inputs):
    columns = tensor(inputs["old_logp"]), tensor(inputs["logprobs"]), torch.tensor(inputs["versions"])
    version = args["current_version"]
    return {
        "loglinear": loglinear(*columns, version),
        "linear": linear_proximal(*columns, version),
        "rollout": columns[0],
    }


@family("areal_critic_loss")
def run_critic_loss(args, inputs):
    values, mask = tensor(inputs["value"]).requires_grad_(), tensor(inputs["loss_mask"])
    old, target = tensor(inputs["old_value"]), tensor(inputs["target_value"])
    loss = value_loss(values, old, target, mask, clip=args["value_eps_clip"], kind=args["loss_fn_type"])
    total = aggregate(loss.token_losses, mask, "token-mean", StepTotals.of(mask))
    total.backward()
    clipped = areal_value_clip_mask(values, old, target, mask, args["value_eps_clip"], args["loss_fn_type"])
    return {"loss": total, "grad_value": values.grad, "clip_mask": clipped}


@family("areal_dpo_loss")
def run_preference(args, inputs):
    margin = tensor(inputs["logits"]).requires_grad_()
    losses = (dpo if args["loss_type"] == "sigmoid" else ipo)(margin, beta=args["beta"])
    losses.sum().backward()
    return {"loss": losses, "grad_logits": margin.grad}
