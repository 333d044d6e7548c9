"""Corrections for off-policy data against verl and AReaL, and AReaL's losses."""

from __future__ import annotations

import torch
from algorithms.oracle import family, tensor
from algorithms.oracle_losses import corrected, rules, weighing
from algorithms.oracle_only import areal_value_clip_mask, dpo, ipo

from headwater.algorithms.corrections import CorrectionInputs
from headwater.algorithms.corrections.m2po import m2po
from headwater.algorithms.diagnostics import offpolicy_metrics
from headwater.algorithms.kl import kl_penalty
from headwater.algorithms.masked import StepTotals, aggregate, keep, masked_mean
from headwater.algorithms.policy_losses import PolicyLossInputs
from headwater.algorithms.policy_losses.decoupled import decoupled
from headwater.algorithms.policy_losses.sapo import sapo
from headwater.algorithms.proximal import linear, loglinear
from headwater.learner.critic import value_loss


def as_rollout(inputs) -> CorrectionInputs:
    """verl's vectors give the log ratio itself."""
    log_ratio = tensor(inputs["log_ratio"])
    return CorrectionInputs(log_ratio, torch.zeros_like(log_ratio), tensor(inputs["response_mask"]))


VERL_METRICS = {
    "effective_sample_size": "eff_sample_size",
    "weight_mean": "mean",
    "weight_std": "std",
    "sequence_weight_mean": "seq_mean",
    "sequence_weight_std": "seq_std",
    "sequence_weight_max": "seq_max",
    "sequence_weight_min": "seq_min",
    "sequence_weight_max_deviation": "seq_max_deviation",
    "ratio_high_fraction": "ratio_fraction_high",
    "ratio_low_fraction": "ratio_fraction_low",
    "sequence_ratio_high_fraction": "seq_fraction_high",
    "sequence_ratio_low_fraction": "seq_fraction_low",
    "outside_fraction": "oob_ratio",
    "normalizer": "batch_norm_factor",
}
EXTREMES = {
    "token": {"weight_max": "max", "weight_min": "min"},
    "sequence": {"ratio_max": "max", "ratio_min": "min"},
}
"""For sequences verl reports the range of the ratios, for tokens that of the weights."""


@family("verl_rollout_is_weights")
def run_importance_weights(args, inputs):
    level = args["rollout_is"]
    settings = weighing(level, args["rollout_is_threshold"], args["rollout_is_batch_normalize"])
    correction, metrics = corrected(as_rollout(inputs), settings)
    (name,), theirs = settings, VERL_METRICS | EXTREMES[level]
    shown = {
        f"rollout_is_{theirs[metric]}": metrics[f"{name}/{metric}"]
        for metric in theirs
        if f"{name}/{metric}" in metrics
    }
    return {"rollout_is_weights": correction.weights, "metrics": shown}


@family("verl_rollout_rejection")
def run_rejection(args, inputs):
    correction, metrics = corrected(
        as_rollout(inputs), {"reject": rules(args["rollout_rs"], args["rollout_rs_threshold"])}
    )
    return {
        "modified_response_mask": correction.mask,
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
    settings = {"lower": args.get("lower"), "upper": args["upper"], "max_log_ratio": None}
    if args["action"] == "mask":
        settings |= {"level": args["level"], "metric": areal_metric(args["metric"]), "weighted": True}
        settings |= {"reduction": args.get("agg", "mean")}
        filtered, (correction, metrics) = "reject/rejected_fraction", corrected(given, {"reject": [settings]})
    else:
        settings |= {"level": {"token": "token", "sequence": "geometric"}[args["level"]], "lower": args.get("lower", 0)}
        filtered, (correction, metrics) = "truncate/truncated_fraction", corrected(given, {"truncate": [settings]})
    return {
        "loss_mask": layout.back(correction.mask),
        "behave_imp_weight": layout.back(correction.weights),
        "filtered_fraction": metrics[filtered],
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
    shown = {"dual_clip_fraction": torch.zeros_like(mask), "kept_fraction": mask, **loss.diagnostics}
    outputs = {
        "loss": total,
        "grad_logprobs": layout.back(logprobs.grad),
        # A rejected token reports its ratio, which AReaL sets to 0.
        "importance_weight": layout.back(keep(shown["ratio"], shown["kept_fraction"])),
        "clip_mask": layout.back(shown["clip_fraction"]),
        "dual_clip_mask": layout.back(shown["dual_clip_fraction"]),
    }
    if args["rejection_sampling"] is not None:
        filtered = {"mask": "rejected_fraction", "clamp": "truncated_fraction"}[args["rejection_sampling"]["action"]]
        outputs |= {
            "behave_imp_weight": layout.back(shown["behaviour_weight"]),
            "behave_mask": layout.back(shown["kept_fraction"]),
            "behave_approx_kl": layout.back(shown["behaviour_kl"]),
            "filtered_fraction": masked_mean(shown[filtered], mask),
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
        "linear": linear(*columns, version),
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
