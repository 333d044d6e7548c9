"""Log-probs of the responses under a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwater.core.data_proto import DataProto


def response_logprobs(model: Any, batch: DataProto, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of every response token, both ``[samples, response]``.

    ``temperature`` is the one the tokens were sampled with, so that engine and trainer speak of the same distribution.
    """
    tensors = batch.batch
    width = tensors["response_mask"].shape[1]
    # The logits that predict the responses are the last width + 1 without the very last.
    logits = model(
        input_ids=tensors["input_ids"],
        attention_mask=tensors["attention_mask"],
        position_ids=tensors["position_ids"],
        logits_to_keep=width + 1,
        use_cache=False,
    ).logits[:, :-1]
    distribution = torch.log_softmax(logits.float() / temperature, dim=-1)
    targets = tensors["input_ids"][:, tensors["input_ids"].shape[1] - width :]
    with torch.no_grad():
        entropy = -(distribution.exp() * distribution).sum(dim=-1)
    return distribution.gather(-1, targets[..., None])[..., 0], entropy
