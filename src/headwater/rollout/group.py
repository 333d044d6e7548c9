"""Groups: the trajectories of one prompt. A group is trained on as a whole, or dropped with a reason."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from headwater.core.errors import RolloutFailed
from headwater.core.records import DropKind, Prompt, Trajectory


@dataclass(frozen=True, slots=True)
class PromptDraw:
    """A prompt to run, and the key from which the randomness of its samples is derived."""

    prompt: Prompt
    rng_key: int
    index: int = -1
    """The row of the dataset; -1 if the prompt does not come from a dataset."""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """All trajectories of one prompt."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    baseline: float | None = None
    """The reward of the greedy response, if the algorithm asked for one."""
    num_lost: int = 0
    """Samples that failed and were left out."""

    def __post_init__(self) -> None:
        strangers = [each.uid for each in self.trajectories if each.uid != self.prompt.uid]
        if strangers:
            raise ValueError(f"group of prompt {self.prompt.uid} holds a trajectory of {strangers[0]}")

    def episode_rewards(self) -> list[float]:
        """One reward per episode: the mean over its pieces."""
        rewards: dict[int, list[float]] = {}
        for each in self.trajectories:
            rewards.setdefault(each.sample, []).append(each.reward)
        # The exact mean: pieces with equal rewards give exactly that reward.
        return [statistics.mean(each) for each in rewards.values()]

    def oldest_version(self) -> int | None:
        """The oldest policy version among the trained tokens; None if no token is trained."""
        arrays = (each.arrays for each in self.trajectories)
        trained = (each.versions[each.loss_mask] for each in arrays)
        return min((int(versions.min()) for versions in trained if len(versions)), default=None)

    def without_older(self, version: int) -> tuple[Group, int]:
        """Remove tokens older than ``version`` from the loss. Returns the new group and the number of such tokens."""
        masked = [_mask_older(each, version) for each in self.trajectories]
        return replace(self, trajectories=tuple(each for each, _ in masked)), sum(count for _, count in masked)


def _mask_older(trajectory: Trajectory, version: int) -> tuple[Trajectory, int]:
    arrays = trajectory.arrays
    mask = arrays.loss_mask & (arrays.versions >= version)
    num_masked = int(arrays.loss_mask.sum() - mask.sum())
    return (trajectory.with_loss_mask(mask) if num_masked else trajectory), num_masked


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group that is not trained on, and why."""

    uid: str
    kind: DropKind
    message: str
    """The cause in words, for people."""


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """The input of one training step, and the groups that were dropped while it was collected."""

    groups: tuple[Group, ...]
    dropped: tuple[Dropped, ...] = ()
    num_masked_tokens: int = 0
    """Sampled tokens that were removed from the loss because they are too old."""

    @property
    def trajectories(self) -> Sequence[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    def group_numbers(self) -> torch.Tensor:
        """``[trajectories]``: the number of each trajectory's group."""
        return torch.tensor([number for number, group in enumerate(self.groups) for _ in group.trajectories])

    def episode_numbers(self) -> torch.Tensor:
        """``[trajectories]``: the number of each one's episode; pieces of one episode share it."""
        numbers: dict[tuple[int, int], int] = {}
        for group_number, group in enumerate(self.groups):
            for each in group.trajectories:
                numbers.setdefault((group_number, each.sample), len(numbers))
        return torch.tensor(
            [numbers[number, each.sample] for number, group in enumerate(self.groups) for each in group.trajectories]
        )

    def baselines(self) -> torch.Tensor | None:
        """``[trajectories]``: the greedy reward of each trajectory's prompt; None if no baseline was computed."""
        if any(group.baseline is None for group in self.groups):
            return None
        return torch.tensor([group.baseline for group in self.groups for _ in group.trajectories])


def too_few(groups: Sequence[object], dropped: Sequence[Dropped]) -> RolloutFailed:
    """The error of a step that cannot collect enough groups."""
    causes = "\n".join(f"  - {each.uid}: {each.message}" for each in dropped[:3])
    kinds = {each.kind for each in dropped}
    remedies = [
        (DropKind.FILTERED in kinds, _FILTERED_REMEDY),
        (DropKind.STALE in kinds, _STALE_REMEDY),
        (any(kind.is_failure for kind in kinds), _FAILED_REMEDY),
    ]
    remedy = "; ".join(text for applies, text in remedies if applies)
    return RolloutFailed(
        f"{len(dropped)} groups of this step were dropped and only {len(groups)} are complete; the first causes "
        f"({remedy}):\n{causes}"
    )


_FILTERED_REMEDY = (
    "if all responses to a prompt get the same reward, use prompts of another difficulty, raise "
    "algorithm.max_filter_rounds, or set algorithm.filter_groups=false"
)
_STALE_REMEDY = "if groups are too old, raise rollout.max_staleness or set rollout.on_stale=mask"
_FAILED_REMEDY = "if a failure is temporary, raise rollout.max_retries"
