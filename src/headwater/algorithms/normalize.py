"""Normalisation of rewards or advantages over the batch or within groups (AReaL), and changes to single scores."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from headwater.algorithms.groups import Groups
from headwater.algorithms.masked import keep

Level = Literal["batch", "group", "none"]

_ROUNDING = 1e-6
"""A deviation below this fraction of the largest reward is a rounding error of float32: the scores are equal."""

_NO_WEIGHT = 1e-6
"""A sum of weights below this is a rounding error: no entry is left."""


def normalize(
    values: Tensor,
    *,
    mask: Tensor | None = None,
    groups: Tensor | None = None,
    episodes: Tensor | None = None,
    weights: Tensor | None = None,
    mean_level: Level = "batch",
    std_level: Level = "batch",
    leave_one_out: bool = False,
    unbiased: bool = True,
    epsilon: float = 1e-5,
) -> Tensor:
    """``(x - mean) / (std + epsilon)``. The mean and the deviation are those of the batch, of the group, or not used.

    ``values`` are ``[samples]``, or ``[samples, tokens]`` with statistics over the tokens that ``mask`` keeps; other
    tokens become 0. With ``leave_one_out``, the mean excludes the entry that it is subtracted from. ``episodes``
    ``[samples]`` is equal for the pieces of an episode, and ``weights`` ``[samples]`` are the weights of rows in the
    statistics, 1 by default; see ``piece_weights``.

    A sample that is alone in its group follows AReaL: its unbiased deviation is 1, and the mean of the other values, of
    which there are none, is 0.
    """
    wide = values.double().reshape(len(values), -1)
    kept = torch.ones_like(wide) if mask is None else (mask != 0).double().reshape(wide.shape)
    wide = keep(wide, kept)
    if weights is not None:
        kept = kept * weights.double()[:, None]
    numbers = torch.zeros(len(values), device=values.device) if groups is None else groups
    alone = Groups.of(numbers, episodes).single[:, None]
    mean = _mean(wide, kept, _grouping(numbers, mean_level), leave_one_out, alone & (mean_level == "group"))
    centred = keep(wide - mean, kept)
    std = _std(centred, kept, _grouping(numbers, std_level), unbiased, alone & (std_level == "group"))
    if std is not None:
        centred = centred / (std + epsilon)
    return centred.reshape(values.shape).to(values.dtype)


def normalize_rewards(
    rewards: Tensor,
    columns: Tensor,
    *,
    groups: Tensor,
    episodes: Tensor | None = None,
    mean_level: Level,
    std_level: Level,
    leave_one_out: bool,
    unbiased: bool,
    epsilon: float,
) -> Tensor:
    """Rewards ``[samples, tokens]`` whose sums are the normalised scores; a score is the sum of a row.

    Every reward is divided by the deviation in its own column. The mean is subtracted in ``columns`` ``[samples]``, the
    columns of the scores. The rewards of turns therefore keep their columns and their proportions. ``episodes``
    ``[samples]`` is equal for the pieces of an episode; the mean and the deviation are those of episodes. A sample that
    is alone in its group is treated as in ``normalize``.
    """
    wide = rewards.double()
    scores = wide.sum(dim=1, keepdim=True)
    kept = torch.ones_like(scores)
    alone = Groups.of(groups, episodes).single[:, None]
    centred = scores - _mean(
        scores, kept, _grouping(groups, mean_level, episodes), leave_one_out, alone & (mean_level == "group")
    )
    std = _std(centred, kept, _grouping(groups, std_level, episodes), unbiased, alone & (std_level == "group"))
    scale = kept
    if std is not None:
        centred = centred / (std + epsilon)
        # Equal scores have no deviation: dividing the rewards of turns by epsilon would only amplify them.
        scale = (1 / (std + epsilon)).where(alone | (std > _ROUNDING * wide.abs().max()), 0.0)
    if mean_level == "group" and not leave_one_out:
        # The only score of a group is its own mean: nothing is left of it, in no turn.
        scale = scale.masked_fill(alone, 0.0)
    place = columns[:, None]
    elsewhere = (wide * scale).scatter(1, place, 0.0)
    return elsewhere.scatter(1, place, centred - elsewhere.sum(dim=1, keepdim=True)).to(rewards.dtype)


def _grouping(numbers: Tensor, level: Level, episodes: Tensor | None = None) -> Groups | None:
    if level == "none":
        return None
    return Groups.of(numbers if level == "group" else torch.zeros_like(numbers), episodes)


def _total(values: Tensor, groups: Groups) -> Tensor:
    """``[samples, 1]``: the sum over all entries of the sample's group."""
    return groups.sum(values.sum(dim=1))[:, None]


def _mean(values: Tensor, kept: Tensor, groups: Groups | None, leave_one_out: bool, alone: Tensor) -> Tensor:
    if groups is None:
        return torch.zeros_like(values)
    weighed = values * kept
    total, count = _total(weighed, groups), _total(kept, groups)
    if leave_one_out:
        total, count = total - groups.of_episode(weighed), count - groups.of_episode(kept)
        # The tokens of a sample are no other values to compare with.
        count = count.masked_fill(alone, 0.0)
    return torch.where(count > _NO_WEIGHT, total / count.clamp(min=_NO_WEIGHT), 0.0)


def _std(centred: Tensor, kept: Tensor, groups: Groups | None, unbiased: bool, alone: Tensor) -> Tensor | None:
    """The deviation from the mean that was subtracted, which may have another level."""
    if groups is None:
        return None
    squares, count = _total(centred.square() * kept, groups), _total(kept, groups)
    if not unbiased:
        return torch.where((count > _NO_WEIGHT) & ~alone, squares / count.clamp(min=_NO_WEIGHT), 1.0).sqrt()
    has_deviation = (count - 1 > _NO_WEIGHT) & ~alone
    return torch.where(has_deviation, squares / (count - 1).clamp(min=1), 1.0).sqrt()


def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer_tokens: int, factor: float = 1.0) -> Tensor:
    """``[samples]``, DAPO: 0 up to ``max_tokens - buffer_tokens``, then falling to ``-factor`` at ``max_tokens``."""
    over = (lengths - (max_tokens - buffer_tokens)).to(torch.float32)
    return (-over / buffer_tokens * factor).clamp(max=0.0)


def scale_scores(rewards: Tensor, columns: Tensor, *, bias: float, scale: float, clip: float) -> Tensor:
    """Rewards ``[samples, tokens]`` whose sums are ``(score + bias)·scale``, limited to ``±clip``.

    The score of a sample is the sum of its row. A ``clip`` of 0 means no limit. Rewards of turns are scaled in their
    columns. The bias and the limit are applied in ``columns`` ``[samples]``, the columns of the scores.
    """
    scaled = rewards * scale
    scores = (rewards.sum(dim=1) + bias) * scale
    if clip:
        scores = scores.clamp(-clip, clip)
    place = columns[:, None]
    elsewhere = scaled.scatter(1, place, 0.0)
    return elsewhere.scatter(1, place, scores[:, None] - elsewhere.sum(dim=1, keepdim=True))
