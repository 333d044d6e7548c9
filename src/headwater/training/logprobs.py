"""Log-probs of the responses under a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwater.core.data_proto import DataProto

_ENTROPY_CHUNK = 1 << 24


def response_logprobs(model: Any, batch: DataProto, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of every response token, both ``[samples, response]``.

    ``temperature`` is the one the tokens were sampled with, so that engine and trainer speak of the same distribution.
    """
    tensors = batch.batch
    width = tensors["response_mask"].shape[1]
    # The logits that predict the responses are the last width + 1 without the very last.
    logits = (
        model(
            input_ids=tensors["input_ids"],
            attention_mask=tensors["attention_mask"],
            position_ids=tensors["position_ids"],
            logits_to_keep=width + 1,
            use_cache=False,
        )
        .logits[:, :-1]
        .float()
        .div(temperature)
    )
    targets = tensors["input_ids"][:, tensors["input_ids"].shape[1] - width :]
    # Not log_softmax: its output would be a second tensor of the vocabulary's size, kept for the backward pass.
    logprobs = logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(dim=-1)
    return logprobs, _entropy(logits.detach())


def _entropy(logits: Tensor) -> Tensor:
    """In chunks: it is only for show, and must not need more tensors of the whole batch times the vocabulary."""
    tokens = logits.flatten(0, 1)
    chunks = torch.split(tokens, max(1, _ENTROPY_CHUNK // tokens.shape[-1]))
    return torch.cat([_chunk_entropy(chunk) for chunk in chunks]).view(logits.shape[:-1])


def _chunk_entropy(logits: Tensor) -> Tensor:
    logprobs = logits.log_softmax(dim=-1)
    return -(logprobs.exp() * logprobs).sum(dim=-1)
