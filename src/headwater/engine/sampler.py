"""Sampling: one uniform number per token is mapped to a token with the inverse of the cumulative distribution.

The uniform number is a hash of the request's key and the position. A request therefore samples the same tokens
whatever else is in the batch, and an interrupted request continues exactly where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.core.records import SamplingParams

_CHUNK = 256

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
    # torch shifts signed numbers arithmetically. Masking the copied sign bits makes the shift logical.
    return (value >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(frozen=True)
class SamplingNeeds:
    """What sampling needs for a set of rows. Operations that no row needs are skipped."""

    truncates: bool = False
    """Whether any row truncates its distribution. Otherwise the vocabulary is not sorted."""
    scales: bool = False
    """Whether any row has a temperature other than 1. Otherwise one pass over the logits is saved."""
    has_greedy: bool = False
    """Whether any row takes the most likely token. Otherwise it is not searched for."""
    has_minimum: bool = False
    """Whether any row has a minimum number of tokens."""

    @classmethod
    def of(cls, *params: SamplingParams) -> SamplingNeeds:
        return cls(
            truncates=any(each.top_k > 0 or each.top_p < 1 or each.min_p > 0 for each in params),
            scales=any(each.temperature not in (0.0, 1.0) for each in params),
            has_greedy=any(each.temperature == 0 for each in params),
            has_minimum=any(each.min_new_tokens > 0 for each in params),
        )


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling settings of a batch, one tensor per setting and one entry per row."""

    keys: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    needs: SamplingNeeds

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
            needs=SamplingNeeds.of(*params),
        )

    @property
    def cuts(self) -> Tensor:
        """Per row, whether its distribution is truncated."""
        return ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)) & (self.temperature > 0)

    def map(self, change: Callable[[Tensor], Tensor]) -> SamplingBatch:
        """The same settings with ``change`` applied to every column."""
        return replace(
            self,
            keys=change(self.keys),
            temperature=change(self.temperature),
            top_k=change(self.top_k),
            top_p=change(self.top_p),
            min_p=change(self.min_p),
        )


def sample(logits: Tensor, batch: SamplingBatch, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token per row of ``logits`` [rows, vocabulary].

    Returns the tokens and their log-probs under the distribution they were sampled from (temperature and truncation
    applied). Greedy rows report the log-prob at temperature 1.
    """
    greedy = batch.temperature == 0
    scaled = logits.float()
    if batch.needs.scales:
        scaled = scaled / torch.where(greedy, 1.0, batch.temperature)[:, None]
    if batch.needs.truncates:
        # Rows without truncation keep exactly the same bits, whatever their neighbours need.
        scaled = torch.where(batch.cuts[:, None], _truncate(scaled.log_softmax(dim=-1), batch), scaled)
    highest = scaled.amax(dim=-1, keepdim=True)
    tokens, total = _inverse_cdf((scaled - highest).exp_(), uniforms(batch.keys, positions))
    if batch.needs.has_greedy:
        tokens = torch.where(greedy, scaled.argmax(dim=-1), tokens)
    logprobs = scaled.gather(-1, tokens[:, None]) - highest - total.log()
    return tokens, logprobs[:, 0].float()


def _inverse_cdf(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Per row, the first index where the cumulative sum exceeds ``uniform`` times the total, and the total.

    The sum runs over chunks first and then inside one chunk, so that only a small part of a large vocabulary needs a
    cumulative sum. It is computed in float64, because the smallest probability must still change the sum.
    """
    num_rows, vocabulary = weights.shape
    if vocabulary % _CHUNK:
        weights = F.pad(weights, (0, -vocabulary % _CHUNK))
    chunks = weights.view(num_rows, -1, _CHUNK)
    cumulative = chunks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    target = uniform[:, None] * total
    chunk = _first_beyond(cumulative, target)
    before = F.pad(cumulative, (1, 0)).gather(1, chunk)
    inside = chunks.gather(1, chunk[:, :, None].expand(-1, -1, _CHUNK))[:, 0].to(torch.float64).cumsum(dim=-1)
    tokens = (chunk * _CHUNK + _first_beyond(inside, target - before))[:, 0]
    return tokens.clamp(max=vocabulary - 1), total


def _first_beyond(cumulative: Tensor, target: Tensor) -> Tensor:
    index = torch.searchsorted(cumulative, target, right=True)
    # Rounding may push the target up to the total. Then the result is the last index with a positive weight. If the
    # sum is NaN, the index does not matter: the log-prob is NaN and the request fails.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous(), right=False)
    return torch.minimum(index, last).clamp(max=cumulative.shape[1] - 1)


def _truncate(logprobs: Tensor, batch: SamplingBatch) -> Tensor:
    """Remove what top-k, top-p and min-p exclude and renormalise. The most likely token is always kept."""
    # A stable sort keeps the lower ids among equally likely tokens at the boundary, whichever algorithm sorts.
    ordered, order = logprobs.sort(stable=True, dim=-1, descending=True)
    rank = torch.arange(ordered.shape[-1], device=ordered.device)[None, :]
    top_k = torch.where(batch.top_k > 0, batch.top_k, ordered.shape[-1])
    keep = rank < top_k[:, None]
    # top-p applies to the tokens that top-k kept, as is conventional.
    probabilities = torch.where(keep, ordered, -torch.inf).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    keep &= before < batch.top_p[:, None]
    keep &= ordered.exp() >= batch.min_p[:, None] * ordered[:, :1].exp()
    keep |= rank == 0
    kept = torch.where(keep, ordered, -torch.inf).log_softmax(dim=-1)
    return torch.full_like(logprobs, -torch.inf).scatter(-1, order, kept)
