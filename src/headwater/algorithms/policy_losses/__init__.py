"""Policy losses, one file each: ``f(inputs: PolicyLossInputs, **settings) -> PolicyLoss``.

They return one loss per token and know nothing of micro-batches or ranks; aggregation is the training engine's. The
weights of a correction come afterwards, by ``PolicyLoss.weighted``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headwater.algorithms.masked import bounded, check_shapes, keep, masked_mean
from headwater.core.registry import Registry

POLICY_LOSSES = Registry("policy loss", "headwater.algorithms.policy_losses")

_SMALLEST_WEIGHT = 1e-10
"""Added before the logarithm, as verl does, so that a weight of 0 among others is not minus infinity."""


@dataclass(frozen=True)
class PolicyLossInputs:
    """What a loss may use, all ``[samples, tokens]`` and set to 0 where ``mask`` is 0."""

    logprobs: Tensor
    """Of the policy being trained; with ``entropy`` the only one with a gradient."""
    old_logprobs: Tensor
    """Of the policy that updates are measured from: the proximal policy where it differs from the one that sampled."""
    advantages: Tensor
    mask: Tensor
    """1 on the tokens that are trained. A loss of one token need not apply it."""
    rollout_logprobs: Tensor | None = None
    """Of the policy that sampled, as the engine recorded them."""
    entropy: Tensor | None = None

    def __post_init__(self) -> None:
        names = ("logprobs", "old_logprobs", "advantages", "rollout_logprobs", "entropy")
        columns = {name: getattr(self, name) for name in names}
        check_shapes(tuple(self.mask.shape), **columns)
        # Masking the sum of the losses would not do: the gradient of a NaN token is NaN however small its share.
        for name, value in columns.items():
            if value is not None:
                object.__setattr__(self, name, keep(value, self.mask))


@dataclass(frozen=True)
class PolicyLoss:
    token_losses: Tensor
    """0 where the loss removes a token. Averages still count it, so that the others do not count more."""
    diagnostics: Mapping[str, Tensor] = field(default_factory=dict)
    """Per-token values worth a masked mean in the metrics."""
    aggregation: str | None = None
    """Set by a loss that is defined only under one aggregation; it goes before the configured one."""
    per_sequence: bool = False
    """Whether a row has one loss, a product over its tokens' ratios, that all of its tokens repeat."""
    weights: Tensor | None = None
    """What a loss weighs its tokens by because another policy sampled them; worth an effective sample size."""
    log_ratios: Tensor | None = None
    """``logprobs - old_logprobs``, worth percentiles; the actor sets it for every loss."""

    def weighted(self, weights: Tensor, mask: Tensor) -> PolicyLoss:
        """Times a correction's ``weights`` ``[samples, tokens]``.

        The one loss of a row takes one weight. It stands for a geometric mean of ratios, so its weight is the geometric
        mean of its tokens' weights; multiplying token by token would make that an arithmetic one.
        """
        if self.per_sequence:
            logs = (weights + _SMALLEST_WEIGHT).log()
            weights = masked_mean(logs, mask, dim=-1).exp()[:, None].expand_as(mask)
        return replace(self, token_losses=self.token_losses * weights)


def log_ratios(inputs: PolicyLossInputs) -> Tensor:
    return bounded(inputs.logprobs - inputs.old_logprobs)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """``max(-A·r, -A·clip(r, 1-low, 1+high))``, and where the clip decided."""
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(plain, clipped), (clipped > plain).to(ratio.dtype)


def dual_clip_bound(losses: Tensor, advantages: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """At most ``-A·bound`` where ``A < 0``, and where that decided: one runaway ratio must not own the batch."""
    limit = -advantages * bound
    decided = (advantages < 0) & (losses > limit)
    return torch.where(advantages < 0, torch.minimum(losses, limit), losses), decided.to(losses.dtype)


def token_covariance(inputs: PolicyLossInputs) -> Tensor:
    """``(A - mean A)·(logp - mean logp)`` over the kept tokens, without gradient."""
    advantages, logprobs, mask = inputs.advantages, inputs.logprobs.detach(), inputs.mask
    product = (advantages - masked_mean(advantages, mask)) * (logprobs - masked_mean(logprobs, mask))
    return keep(product, mask)
