"""Advantage estimators, one file each: ``f(inputs: AdvantageInputs, **settings) -> advantages [samples, tokens]``."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headwater.core.registry import Registry

ADVANTAGES = Registry("advantage", "headwater.algorithms.advantages")


@dataclass(frozen=True)
class AdvantageInputs:
    """What an estimator may use. ``rewards`` and ``mask`` are ``[samples, tokens]``."""

    rewards: Tensor
    mask: Tensor
    """1 on the tokens that are trained."""
    groups: Tensor
    """``[samples]``: the number of each sample's group."""
