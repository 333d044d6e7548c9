"""Policy losses, one file each: ``f(inputs: PolicyLossInputs, **settings) -> PolicyLoss``.

They return one loss per token and do not depend on micro-batches or ranks; the learner aggregates them. The weights of
a correction are applied afterwards, by ``PolicyLoss.weighted``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headwater.algorithms.corrections import Correction
from headwater.algorithms.masked import bounded, check_shapes, keep, masked_mean
from headwater.config.arguments import checked
from headwater.core.registry import Registry

POLICY_LOSSES = Registry("policy loss", "headwater.algorithms.policy_losses", prepare=checked)

_SMALLEST_WEIGHT = 1e-10
"""Added before the logarithm, as in verl, so that the logarithm of a weight of 0 is finite."""


@dataclass(frozen=True)
class PolicyLossInputs:
    """What a loss may use, all ``[samples, tokens]`` and set to 0 where ``mask`` is 0."""

    logprobs: Tensor
    """Of the policy being trained. Only these and ``entropy`` have a gradient."""
    old_logprobs: Tensor
    """Of the policy that updates are measured from: the proximal policy if it differs from the one that sampled."""
    advantages: Tensor
    mask: Tensor
    """1 on the tokens that are trained. Losses do not need to apply it to their token losses."""
    rollout_logprobs: Tensor | None = None
    """Of the policy that sampled, as the engine recorded them."""
    entropy: Tensor | None = None

    def __post_init__(self) -> None:
        names = ("logprobs", "old_logprobs", "advantages", "rollout_logprobs", "entropy")
        columns = {name: getattr(self, name) for name in names}
        check_shapes(tuple(self.mask.shape), **columns)
        # Masking the losses is not enough: the gradient of a NaN stays NaN when it is multiplied by 0.
        for name, value in columns.items():
            if value is not None:
                object.__setattr__(self, name, keep(value, self.mask))


@dataclass(frozen=True)
class PolicyLoss:
    token_losses: Tensor
    """0 where the loss removes a token. Averages still count such tokens, so that the others do not weigh more."""
    diagnostics: Mapping[str, Tensor] = field(default_factory=dict)
    """Values per token whose masked mean is reported."""
    aggregation: str | None = None
    """Set by a loss that is defined for one aggregation only; it replaces the configured one."""
    per_sequence: bool = False
    """Whether a row has one loss, made of the product of its ratios, which is repeated for all of its tokens."""
    weights: Tensor | None = None
    """The importance weights that the loss applied; their effective sample size is reported."""
    correction: Correction | None = None
    """What the actor corrected in this update; only the tokens that its mask keeps are aggregated."""
    log_ratios: Tensor | None = None
    """``logprobs - old_logprobs``, whose percentiles are reported; the actor sets it for every loss."""

    def weighted(self, weights: Tensor, mask: Tensor) -> PolicyLoss:
        """The loss multiplied by the ``weights`` ``[samples, tokens]`` of a correction.

        A loss per sequence takes one weight per row. It contains a geometric mean of ratios, so its weight is the
        geometric mean of the token weights.
        """
        if self.per_sequence:
            logs = (weights + _SMALLEST_WEIGHT).log()
            weights = masked_mean(logs, mask, dim=-1).exp()[:, None].expand_as(mask)
        return replace(self, token_losses=self.token_losses * weights)


def log_ratios(inputs: PolicyLossInputs, limit: float | None) -> Tensor:
    """``logp - old``, clamped to ``±limit`` unless that is None."""
    return bounded(inputs.logprobs - inputs.old_logprobs, limit)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """``max(-A·r, -A·clip(r, 1-low, 1+high))``, and where the clip took effect."""
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(plain, clipped), (clipped > plain).to(ratio.dtype)


def dual_clip_bound(losses: Tensor, advantages: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """At most ``-A·bound`` where ``A < 0``, and where that took effect: it limits the influence of a single ratio."""
    limit = -advantages * bound
    decided = (advantages < 0) & (losses > limit)
    return torch.where(advantages < 0, torch.minimum(losses, limit), losses), decided.to(losses.dtype)


def token_covariance(inputs: PolicyLossInputs) -> Tensor:
    """``(A - mean A)·(logp - mean logp)`` over the kept tokens, without gradient."""
    advantages, logprobs, mask = inputs.advantages, inputs.logprobs.detach(), inputs.mask
    product = (advantages - masked_mean(advantages, mask)) * (logprobs - masked_mean(logprobs, mask))
    return keep(product, mask)
