"""Policy losses, one file each: ``f(inputs: PolicyLossInputs, **settings) -> PolicyLoss``.

They return one loss per token and know nothing of micro-batches or ranks; aggregation is the training engine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from headwater.core.registry import Registry

POLICY_LOSSES = Registry("policy loss", "headwater.algorithms.policy_losses")

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this size before the exponential, so that one wild token cannot overflow."""


@dataclass(frozen=True)
class PolicyLossInputs:
    """What a loss may use, all ``[samples, tokens]``."""

    logprobs: Tensor
    """Of the policy being trained; the only one with a gradient."""
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    """1 on the tokens that are trained. A loss of one token need not apply it."""


@dataclass(frozen=True)
class PolicyLoss:
    token_losses: Tensor
    diagnostics: Mapping[str, Tensor] = field(default_factory=dict)
    """Per-token values worth a masked mean in the metrics."""
