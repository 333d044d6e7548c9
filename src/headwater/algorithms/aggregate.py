"""From per-token losses to one number, so that splitting a batch never changes the gradient."""

from __future__ import annotations

from torch import Tensor

from headwater.algorithms.masked import masked_sum


def token_mean(token_losses: Tensor, mask: Tensor, num_tokens_global: float) -> Tensor:
    """Sum of the kept losses over the token count of the **whole** optimiser step.

    Each micro-batch divides by the same global count, so the micro-batches' losses add up to the loss of the whole.
    """
    return masked_sum(token_losses, mask) / num_tokens_global
