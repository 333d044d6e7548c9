"""Random batches for the property tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from headwater.algorithms.advantages import AdvantageInputs
from headwater.algorithms.corrections import CorrectionInputs
from headwater.algorithms.policy_losses import PolicyLossInputs


@dataclass
class Batch:
    """Numbers for everything an algorithm may read, with holes in the mask and rows that are empty."""

    generator: torch.Generator
    mask: torch.Tensor
    groups: torch.Tensor

    @property
    def shape(self):
        return self.mask.shape

    def normal(self, *shape):
        return torch.randn(*(shape or self.shape), generator=self.generator)

    def logprobs(self):
        return -self.normal().abs()

    def order(self):
        return torch.randperm(len(self.mask), generator=self.generator)


@st.composite
def batches(draw, min_group=1):
    num_groups, width = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    sizes = [draw(st.integers(min_group, 4)) for _ in range(num_groups)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = (torch.rand(sum(sizes), width, generator=generator) < 0.7).float()
    mask[0, 0] = 1  # a batch without any trained token is refused before it comes here
    groups = torch.repeat_interleave(torch.tensor(sizes))
    return Batch(generator, mask, groups)


def advantage_inputs(batch: Batch) -> AdvantageInputs:
    rows = len(batch.mask)
    scores = batch.normal(rows).round(decimals=1)
    columns = torch.arange(batch.shape[1]).expand(batch.shape)
    last = torch.where(batch.mask != 0, columns, 0).amax(dim=1)
    rewards = torch.zeros(batch.shape).scatter_(1, last[:, None], scores[:, None])
    return AdvantageInputs(
        rewards,
        batch.mask,
        batch.groups,
        episodes=torch.arange(rows),
        values=batch.normal(),
        baselines=batch.normal(rows),
        turns=columns // 2,
        reward_parts=batch.normal(rows, 3),
        old_logprobs=batch.logprobs(),
        sum_pi_squared=torch.rand(batch.shape, generator=batch.generator),
        weights=batch.normal().exp(),
    )


def policy_loss_inputs(batch: Batch) -> dict[str, torch.Tensor]:
    names = ("logprobs", "old_logprobs", "rollout_logprobs")
    return {name: batch.logprobs() for name in names} | {"advantages": batch.normal(), "mask": batch.mask}


def as_loss_inputs(columns: dict[str, torch.Tensor]) -> PolicyLossInputs:
    return PolicyLossInputs(**columns)


def correction_inputs(batch: Batch) -> CorrectionInputs:
    return CorrectionInputs(batch.logprobs(), batch.logprobs(), batch.mask)


def spoilt(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """NaN, infinity and nonsense wherever the mask is 0."""
    nonsense = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30]).repeat(-(-values.numel() // 4))
    return torch.where(mask != 0, values, nonsense[: values.numel()].view(values.shape))
