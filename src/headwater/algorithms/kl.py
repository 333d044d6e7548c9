"""Staying near a reference policy: estimators of the divergence, a penalty in the reward, and control of its size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from headwater.algorithms.masked import bounded, keep, masked_mean
from headwater.core.errors import UnknownName
from headwater.core.registry import nearest

KINDS = ("k1", "abs", "k2", "k3")
"""A ``+`` after a name keeps the value of the estimator and uses the gradient of k2."""

Clamp = Literal["k3", "all", "none"]
"""Which estimators are limited to ±10: only k3 (verl), all (AReaL), or none."""

_MAX_KL = 10.0


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: str, clamp: Clamp = "k3") -> Tensor:
    """``d = logp - ref``: k1 is ``d``, abs ``|d|``, k2 ``d²/2``, k3 ``exp(-d) + d - 1``, limited as ``clamp`` says.

    As a loss, k2 has the correct gradient in expectation, while k1 and k3 do not: ``k3+`` has the low-variance value of
    k3 and the gradient of k2.
    """
    if kind.endswith("+"):
        value = kl_penalty(logprobs, ref_logprobs, kind[:-1], clamp)
        slope = kl_penalty(logprobs, ref_logprobs, "k2", "none")
        return slope - slope.detach() + value.detach()
    is_limited = clamp == "all" or (clamp == "k3" and kind == "k3")
    value = _estimate(logprobs - ref_logprobs, kind, is_limited)
    return value.clamp(-_MAX_KL, _MAX_KL) if is_limited else value


def _estimate(difference: Tensor, kind: str, is_limited: bool) -> Tensor:
    if kind == "k1":
        return difference
    if kind == "abs":
        return difference.abs()
    if kind == "k2":
        return difference.square() / 2
    if kind == "k3":
        # Beyond ±20 the result is limited in any case, and the exponential must not overflow before that.
        negative = bounded(-difference) if is_limited else -difference
        return negative.exp() - negative - 1
    known = [name + plus for name in KINDS for plus in ("", "+")]
    raise UnknownName(f"unknown KL estimator {kind!r}; {nearest(kind, known)}")


@dataclass(frozen=True)
class PenalizedRewards:
    rewards: Tensor
    """``[samples, tokens]``."""
    kl_rewards: Tensor
    """``[samples, tokens]``: what the penalty has added to the rewards."""
    kl: float
    """The mean over samples of their means over tokens; controllers are updated with it."""


def penalize_rewards(
    rewards: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    kind: str,
    coefficient: float,
    clamp: Clamp = "k3",
) -> PenalizedRewards:
    """``r - coefficient·kl`` at every kept token."""
    kl = keep(kl_penalty(old_logprobs, ref_logprobs, kind, clamp), mask)
    kl_rewards = -coefficient * kl
    return PenalizedRewards(rewards + kl_rewards, kl_rewards, float(masked_mean(kl, mask, dim=-1).mean()))


class KLController(Protocol):
    coefficient: float

    def update(self, kl: float, num_samples: int) -> None:
        """Adjust the coefficient to the mean KL of a step."""
        ...


class FixedKL:
    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient

    def update(self, kl: float, num_samples: int) -> None:
        """The coefficient never changes."""


class AdaptiveKL:
    """Raises the coefficient while the KL is above the target and lowers it while it is below, by at most 20 % per
    ``horizon`` samples. It is never negative, which would reward divergence."""

    def __init__(self, coefficient: float, *, target: float, horizon: int) -> None:
        self.coefficient = coefficient
        self._target = target
        self._horizon = horizon

    def update(self, kl: float, num_samples: int) -> None:
        if not math.isfinite(kl):
            return  # the step is skipped as well, and a coefficient of NaN would never recover
        error = min(max(kl / self._target - 1, -0.2), 0.2)
        self.coefficient *= max(0.0, 1 + error * num_samples / self._horizon)
