"""Where a response ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def response_mask(tokens: Tensor, end_tokens: Sequence[int]) -> Tensor:
    """1 up to and with the first end token of each row, int64."""
    ends = torch.isin(tokens, torch.tensor(list(end_tokens), device=tokens.device)).long()
    # An end token has itself in its running count but not in the count before it.
    return (ends.cumsum(dim=-1) - ends == 0).long()
