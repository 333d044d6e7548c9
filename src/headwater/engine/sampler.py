"""Drawing tokens: one uniform number per token, turned into a token by the inverse of the cumulative distribution.

The uniform is a hash of (request key, position), so a request draws the same tokens whatever else is in the batch, and
an interrupted request goes on exactly where it stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.core.records import SamplingParams

_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed 64-bit number
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Numbers in [0, 1) from signed 64-bit keys and positions: splitmix64, with 53 bits kept."""
    state = keys + (positions + 1) * _GOLDEN
    state = (state ^ _shift_right(state, 30)) * _MIX_1
    state = (state ^ _shift_right(state, 27)) * _MIX_2
    state = state ^ _shift_right(state, 31)
    return _shift_right(state, 11).to(torch.float64) * 2.0**-53


def _shift_right(value: Tensor, bits: int) -> Tensor:
    # torch shifts signed numbers arithmetically; masking the copied sign bits makes the shift logical.
    return (value >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling settings of a batch, one tensor per setting and one entry per row."""

    keys: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    truncates: bool
    """Whether any row cuts its distribution; sorting the vocabulary is skipped otherwise."""

    @classmethod
    def build(cls, params: Sequence[SamplingParams], keys: Sequence[int], device: torch.device) -> SamplingBatch:
        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            keys=torch.tensor(list(keys), dtype=torch.int64, device=device),
            temperature=column([each.temperature for each in params], torch.float32),
            top_k=column([each.top_k for each in params], torch.int64),
            top_p=column([each.top_p for each in params], torch.float32),
            min_p=column([each.min_p for each in params], torch.float32),
            truncates=any(each.top_k > 0 or each.top_p < 1 or each.min_p > 0 for each in params),
        )


def sample(logits: Tensor, batch: SamplingBatch, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row of ``logits`` [rows, vocabulary].

    Returns the tokens and their log-probs under the distribution they were drawn from (temperature and truncation
    applied). Greedy rows report the log-prob at temperature 1.
    """
    greedy = batch.temperature == 0
    temperature = torch.where(greedy, 1.0, batch.temperature)
    logprobs = torch.log_softmax(logits.float() / temperature[:, None], dim=-1)
    if batch.truncates:
        logprobs = torch.where(greedy[:, None], logprobs, _truncate(logprobs, batch))
    drawn = _inverse_cdf(logprobs, uniforms(batch.keys, positions))
    tokens = torch.where(greedy, logprobs.argmax(dim=-1), drawn)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def _inverse_cdf(logprobs: Tensor, uniform: Tensor) -> Tensor:
    cumulative = logprobs.exp().to(torch.float64).cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    index = torch.searchsorted(cumulative, uniform[:, None] * total, right=True)
    # Rounding may push the product up to the total; the last token with any probability is the answer then.
    last = torch.searchsorted(cumulative, total, right=False)
    return torch.minimum(index, last)[:, 0]


def _truncate(logprobs: Tensor, batch: SamplingBatch) -> Tensor:
    """Remove what top-k, top-p and min-p exclude and renormalise; the likeliest token always stays."""
    ordered, order = logprobs.sort(dim=-1, descending=True)
    rank = torch.arange(ordered.shape[-1], device=ordered.device)[None, :]
    top_k = torch.where(batch.top_k > 0, batch.top_k, ordered.shape[-1])
    keep = rank < top_k[:, None]
    # top-p works on what top-k left over, as samplers conventionally do.
    probabilities = torch.where(keep, ordered, -torch.inf).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    keep &= before < batch.top_p[:, None]
    keep &= ordered.exp() >= batch.min_p[:, None] * ordered[:, :1].exp()
    keep |= rank == 0
    kept = torch.where(keep, ordered, -torch.inf).log_softmax(dim=-1)
    return torch.full_like(logprobs, -torch.inf).scatter(-1, order, kept)
