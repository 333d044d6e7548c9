"""Changes to a sample's score before advantages are estimated."""

from __future__ import annotations

import torch
from torch import Tensor


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
