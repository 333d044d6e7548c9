"""Changes to a sample's score before advantages are estimated."""

from __future__ import annotations

import torch
from torch import Tensor


def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer_tokens: int, factor: float = 1.0) -> Tensor:
    """``[samples]``, DAPO: 0 up to ``max_tokens - buffer_tokens``, then falling to ``-factor`` at ``max_tokens``."""
    over = (lengths - (max_tokens - buffer_tokens)).to(torch.float32)
    return (-over / buffer_tokens * factor).clamp(max=0.0)
