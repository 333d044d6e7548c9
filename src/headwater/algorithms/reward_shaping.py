"""Changes to a sample's score before advantages are estimated. All work on ``[samples]``."""

from __future__ import annotations

import torch
from torch import Tensor


def scale_scores(scores: Tensor, *, bias: float = 0.0, scale: float = 1.0, clip: float | None = None) -> Tensor:
    """``(s + bias)·scale``, clipped to ``±clip``."""
    scaled = (scores + bias) * scale
    return scaled if clip is None else scaled.clamp(-clip, clip)


def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer_tokens: int, factor: float = 1.0) -> Tensor:
    """What DAPO adds to the score: 0 up to ``max_tokens - buffer_tokens``, then falling to ``-factor`` at the limit."""
    over = (lengths - (max_tokens - buffer_tokens)).to(torch.float32)
    return (-over / buffer_tokens * factor).clamp(max=0.0)


def zero_unfinished(scores: Tensor, finished: Tensor) -> Tensor:
    """No score for a response that was cut off."""
    return torch.where(finished, scores, torch.zeros_like(scores))
