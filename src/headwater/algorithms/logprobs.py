"""What a row of logits says of one token. All over the last axis, in the dtype of the logits."""

from __future__ import annotations

from torch import Tensor


def logprobs_from_logits(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-prob of each token. Not by log_softmax, whose output would be a second tensor of the vocabulary's size."""
    return logits.gather(-1, tokens[..., None])[..., 0] - logits.logsumexp(dim=-1)


def sum_pi_squared_from_logits(logits: Tensor) -> Tensor:
    """The sum of the squared probabilities: the chance that two draws agree."""
    return (2 * logits.log_softmax(dim=-1)).exp().sum(dim=-1)
