"""Decoupled PPO (AReaL): clips around a proximal policy, on samples of an older policy."""

from __future__ import annotations

from typing import Annotated, Literal

from headwater.algorithms.corrections import Correction, CorrectionInputs
from headwater.algorithms.corrections.reject import Metric, Reduction, reject
from headwater.algorithms.corrections.truncate import truncate
from headwater.algorithms.masked import LogRatioLimit, keep, require, row_mean
from headwater.algorithms.policy_losses import (
    POLICY_LOSSES,
    PolicyLoss,
    PolicyLossInputs,
    clipped_surrogate,
    dual_clip_bound,
    log_ratios,
)
from headwater.config.constraints import AtLeast, MoreThan, NotBelow
from headwater.config.traits import LossTraits
from headwater.core.errors import ConfigError


@POLICY_LOSSES.register(LossTraits(two_policies=True))
def decoupled(
    inputs: PolicyLossInputs,
    *,
    clip_low: Annotated[float, AtLeast(0)] = 0.2,
    clip_high: Annotated[float, AtLeast(0)] = 0.2,
    dual_clip: Annotated[float, MoreThan(1)] | None = None,
    ratio_level: Literal["token", "sequence"] = "token",
    weight: Literal["none", "clamp", "mask"] = "mask",
    weight_level: Literal["token", "sequence"] = "token",
    metric: Metric = "ratio",
    reduction: Reduction = "mean",
    lower: float | None = None,
    upper: Annotated[float, AtLeast(0, finite=False), NotBelow("lower")] = 5.0,
    max_log_ratio: LogRatioLimit = None,
) -> PolicyLoss:
    """``ppo(r)·w`` with ``r = exp(logp - proximal)`` and ``w = exp(proximal - behaviour)``.

    ``old_logprobs`` are those of the proximal policy and ``rollout_logprobs`` those of the behaviour policy. If ``w``
    (or ``metric``) is outside ``[lower, upper]``, ``clamp`` clamps it and ``mask`` removes its tokens from the loss. At
    sequence level ``w`` is the geometric mean over the sequence. ``weight="none"`` omits ``w``: plain PPO around the
    proximal policy. ``ratio_level="sequence"`` clips the geometric mean of a sequence's ratios (GSPO), with its mean
    advantage.
    """
    correction = None
    if weight != "none":
        behaviour = require(
            inputs.rollout_logprobs,
            "rollout_logprobs",
            "algorithm.policy_loss = decoupled",
            "use an engine that has them",
        )
        given = CorrectionInputs(inputs.old_logprobs, behaviour, inputs.mask)
        correction = _weigh(given, weight, weight_level, metric, reduction, lower, upper, max_log_ratio)
    mask = inputs.mask if correction is None else correction.mask
    log_ratio, advantages = log_ratios(inputs, max_log_ratio), inputs.advantages
    moved = log_ratio.detach()
    if ratio_level == "sequence":
        log_ratio, advantages = row_mean(log_ratio, mask), row_mean(advantages, mask)
        # A rejected token does not contribute to the ratio of its sequence, but the metrics show the ratio it had.
        moved = log_ratio.detach().where(mask != 0, row_mean(moved, inputs.mask))
    losses, clipped = clipped_surrogate(keep(keep(log_ratio, mask).exp(), mask), advantages, clip_low, clip_high)
    # A rejected token has ratio 0 here, outside of the clip range, but it was not removed by the clip.
    diagnostics = {"approx_kl": -moved, "ratio": moved.exp(), "clip_fraction": keep(clipped, mask)}
    if dual_clip is not None:
        losses, bounded = dual_clip_bound(losses, advantages, dual_clip)
        diagnostics["dual_clip_fraction"] = keep(bounded, mask)
    if correction is None:
        return PolicyLoss(losses, diagnostics)
    diagnostics |= {
        "behaviour_weight": correction.weights,
        "behaviour_kl": keep(given.log_ratio, mask),
        "kept_fraction": mask,
        **correction.diagnostics,
    }
    return PolicyLoss(losses * correction.weights, diagnostics, weights=correction.weights)


def _weigh(
    inputs: CorrectionInputs,
    weight: Literal["clamp", "mask"],
    level: Literal["token", "sequence"],
    metric: Metric,
    reduction: Reduction,
    lower: float | None,
    upper: float,
    max_log_ratio: float | None,
) -> Correction:
    if weight == "mask":
        return reject(
            inputs,
            level=level,
            metric=metric,
            reduction=reduction,
            lower=lower,
            upper=upper,
            weighted=True,
            max_log_ratio=max_log_ratio,
        )
    if metric != "ratio" or (level == "sequence" and reduction != "mean"):
        reason = "clamps the weight itself; use metric: ratio and reduction: mean"
        raise ConfigError([f"algorithm.policy_loss_args.weight = 'clamp': {reason}"])
    return truncate(
        inputs,
        level="token" if level == "token" else "geometric",
        lower=lower or 0.0,
        upper=upper,
        max_log_ratio=max_log_ratio,
    )
