"""The entropy of the next token's distribution."""

from __future__ import annotations

from torch import Tensor


def entropy_from_logits(logits: Tensor) -> Tensor:
    """``-Σ p·log p`` over the last axis."""
    logprobs = logits.log_softmax(dim=-1)
    # A probability of 0 has log-prob -inf where a token was forbidden; its share is 0.
    return -(logprobs.exp() * logprobs.clamp(min=-1e9)).sum(dim=-1)
