"""Groups: the trajectories of one prompt, complete or not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headwater.core.errors import RolloutFailed
from headwater.core.records import Prompt, Trajectory


@dataclass(frozen=True, slots=True)
class PromptDraw:
    """A prompt to run, and the key from which its samples' randomness is derived."""

    prompt: Prompt
    rng_key: int
    index: int = -1
    """The prompt's row of the dataset, where it came from one."""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    baseline: float | None = None
    """The reward of the greedy response, where one was asked for."""
    num_lost: int = 0
    """Samples that failed and are left out."""

    def __post_init__(self) -> None:
        strangers = [each.uid for each in self.trajectories if each.uid != self.prompt.uid]
        if strangers:
            raise ValueError(f"group of prompt {self.prompt.uid} holds a trajectory of {strangers[0]}")


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group that ended without being trained on, and why."""

    uid: str
    reason: str
    is_filtered: bool = False
    """Whether nothing failed, and there was only nothing to learn from it."""
    is_stale: bool = False
    """Whether nothing failed, and it only came too late."""


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """What one training step consumes, and what was dropped on the way to it."""

    groups: tuple[Group, ...]
    dropped: tuple[Dropped, ...] = ()
    num_masked_tokens: int = 0
    """Sampled tokens that are out of the loss because they are too old."""

    @property
    def trajectories(self) -> Sequence[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    def group_numbers(self) -> torch.Tensor:
        """``[trajectories]``: the number of each one's group."""
        return torch.tensor([number for number, group in enumerate(self.groups) for _ in group.trajectories])

    def baselines(self) -> torch.Tensor | None:
        """``[trajectories]``: the greedy reward of each one's prompt; None where it was not asked for."""
        if any(group.baseline is None for group in self.groups):
            return None
        return torch.tensor([group.baseline for group in self.groups for _ in group.trajectories])


def too_few(groups: Sequence[object], dropped: Sequence[Dropped]) -> RolloutFailed:
    """The error of a step for which there are not enough groups."""
    causes = "\n".join(f"  - {each.uid}: {each.reason}" for each in dropped[:3])
    remedies = [
        (any(each.is_filtered for each in dropped), _FILTERED_REMEDY),
        (any(each.is_stale for each in dropped), _STALE_REMEDY),
        (any(not (each.is_filtered or each.is_stale) for each in dropped), _FAILED_REMEDY),
    ]
    remedy = "; ".join(text for applies, text in remedies if applies)
    return RolloutFailed(
        f"{len(dropped)} groups of this step were dropped and only {len(groups)} are complete; the first causes "
        f"({remedy}):\n{causes}"
    )


_FILTERED_REMEDY = (
    "where all responses to a prompt score the same, use prompts of another difficulty, raise "
    "algorithm.max_filter_rounds, or set algorithm.filter_groups=false"
)
_STALE_REMEDY = "where they came too late, raise rollout.max_staleness or set rollout.on_stale=mask"
_FAILED_REMEDY = "where a cause passes by itself, raise rollout.max_retries"
