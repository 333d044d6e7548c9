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

from headwater.core.requests import SamplingParams

_CHUNK = 256
NARROW = 1024
"""How many of the most likely tokens are sorted first. Truncation usually keeps fewer."""
_ROUNDING = 2.0**-22
_LEAST_TERMS = 16
"""The sum of k probabilities in float32 is exact within (k + 16) times this error, in whatever order they are added."""

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
    """Whether any row truncates its distribution. Rows that do not are never sorted."""
    is_wide: bool = False
    """Whether truncation may keep more than ``NARROW`` tokens of any row."""
    scales: bool = False
    """Whether any row has a temperature other than 1. Otherwise one pass over the logits is saved."""
    has_greedy: bool = False
    """Whether any row takes the most likely token. Otherwise it is not searched for."""
    has_minimum: bool = False
    """Whether any row has a minimum number of tokens."""
    is_guided: bool = False
    """Whether any row uses a bias, a penalty, a grammar or alternatives (``engine.guides``)."""

    @classmethod
    def of(cls, *params: SamplingParams) -> SamplingNeeds:
        return cls(
            truncates=any(map(_truncates, params)),
            is_wide=any(_truncates(each) and not 0 < each.top_k <= NARROW for each in params),
            scales=any(each.temperature not in (0.0, 1.0) for each in params),
            has_greedy=any(each.temperature == 0 for each in params),
            has_minimum=any(each.min_new_tokens > 0 for each in params),
            is_guided=any(each.uses_guide for each in params),
        )


def _truncates(params: SamplingParams) -> bool:
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling settings of a batch, one tensor per setting and one entry per row."""

    keys: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    needs: SamplingNeeds
    cut_rows: Tensor | None = None
    """The rows that are truncated, if the host knows them; a row may occur twice. Otherwise they are looked up."""

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

    def truncated_rows(self) -> Tensor:
        if self.cut_rows is not None:
            return self.cut_rows
        cuts = ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)) & (self.temperature > 0)
        return cuts.nonzero()[:, 0]

    def map(self, change: Callable[[Tensor], Tensor]) -> SamplingBatch:
        """The same settings with ``change`` applied to every column."""
        return replace(
            self,
            keys=change(self.keys),
            temperature=change(self.temperature),
            top_k=change(self.top_k),
            top_p=change(self.top_p),
            min_p=change(self.min_p),
            cut_rows=None,
        )

    def of_rows(self, rows: Tensor) -> SamplingBatch:
        return self.map(lambda column: column[rows])


def sample(logits: Tensor, batch: SamplingBatch, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token per row of ``logits`` [rows, vocabulary].

    Returns the tokens and their log-probs under the distribution they were sampled from (temperature and truncation
    applied). Greedy rows report the log-prob at temperature 1.
    """
    tokens, logprobs = sample_uncut(logits, batch, positions)
    if batch.needs.truncates:
        rows = batch.truncated_rows()
        if len(rows):
            cut = sample_cut(logits[rows], batch.of_rows(rows), positions[rows])
            tokens, logprobs = put_rows((tokens, logprobs), rows, cut)
    return tokens, logprobs


def put_rows(drawn: tuple[Tensor, Tensor], rows: Tensor, others: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Tokens and log-probs with those of ``rows`` replaced by ``others``."""
    return drawn[0].index_copy(0, rows, others[0]), drawn[1].index_copy(0, rows, others[1])


def sample_uncut(logits: Tensor, batch: SamplingBatch, positions: Tensor) -> tuple[Tensor, Tensor]:
    """As ``sample``, without truncation."""
    return _draw(_scaled(logits, batch), batch, positions)


def sample_cut(
    logits: Tensor, batch: SamplingBatch, positions: Tensor, *, may_look: bool = True
) -> tuple[Tensor, Tensor]:
    """As ``sample``, for rows that all truncate their distribution.

    ``may_look`` allows a choice that depends on the values, which is impossible while a CUDA graph is captured.
    """
    cut = _truncated(_scaled(logits, batch).log_softmax(dim=-1), batch, may_look=may_look)
    return _draw(cut, batch, positions)


def distribution(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Log-probs of all tokens ``[rows, vocabulary]`` under the distribution that ``sample`` samples from."""
    logprobs = _scaled(logits, batch).log_softmax(dim=-1)
    rows = batch.truncated_rows()
    if len(rows):
        logprobs = logprobs.index_copy(0, rows, _truncated(logprobs[rows], batch.of_rows(rows), may_look=True))
    return logprobs


def _scaled(logits: Tensor, batch: SamplingBatch) -> Tensor:
    scaled = logits.float()
    if batch.needs.scales:
        scaled = scaled / torch.where(batch.temperature == 0, 1.0, batch.temperature)[:, None]
    return scaled


def _draw(scaled: Tensor, batch: SamplingBatch, positions: Tensor) -> tuple[Tensor, Tensor]:
    highest = scaled.amax(dim=-1, keepdim=True)
    tokens, total = _inverse_cdf((scaled - highest).exp_(), uniforms(batch.keys, positions))
    if batch.needs.has_greedy:
        tokens = torch.where(batch.temperature == 0, scaled.argmax(dim=-1), tokens)
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


def _truncated(logprobs: Tensor, batch: SamplingBatch, *, may_look: bool) -> Tensor:
    """Remove what top-k, top-p and min-p exclude and renormalise. The most likely token is always kept.

    What they keep is a prefix of the tokens in the order of their probability. For most rows it is enough to sort the
    ``NARROW`` most likely tokens. The other rows are sorted completely; the result is the same to the last bit.
    """
    vocabulary = logprobs.shape[-1]
    if vocabulary <= NARROW or (batch.needs.is_wide and not may_look):
        return _Prefix.whole(logprobs, batch).put_into(logprobs)
    narrow = _Prefix.narrow(logprobs, batch)
    cut = narrow.put_into(logprobs)
    if batch.needs.is_wide:
        rows = (~narrow.is_enough(batch)).nonzero()[:, 0]
        if len(rows):
            cut.index_copy_(0, rows, _Prefix.whole(logprobs[rows], batch.of_rows(rows)).put_into(logprobs[rows]))
    return cut


@dataclass(frozen=True)
class _Prefix:
    """The most likely tokens of each row, the most likely first, and which of them truncation keeps."""

    ordered: Tensor
    order: Tensor
    before: Tensor
    """The probability of all tokens before each token, among those that top-k keeps."""
    keep: Tensor

    @classmethod
    def whole(cls, logprobs: Tensor, batch: SamplingBatch) -> _Prefix:
        # A stable sort keeps the lower ids among equally likely tokens at the boundary, whichever algorithm sorts.
        ordered, order = logprobs.sort(stable=True, dim=-1, descending=True)
        top_k = torch.where(batch.top_k > 0, batch.top_k, ordered.shape[-1])
        is_top = torch.arange(ordered.shape[-1], device=ordered.device) < top_k[:, None]
        return cls._kept(ordered, order, is_top, torch.where(is_top, ordered, -torch.inf).softmax(dim=-1), batch)

    @classmethod
    def narrow(cls, logprobs: Tensor, batch: SamplingBatch) -> _Prefix:
        ordered, order = _most_likely(logprobs, NARROW)
        top_k = batch.top_k[:, None]
        is_top = (top_k == 0) | (torch.arange(NARROW, device=ordered.device) < top_k)
        among_top = torch.where(is_top, ordered, -torch.inf).softmax(dim=-1)
        return cls._kept(ordered, order, is_top, torch.where(top_k > 0, among_top, ordered.exp()), batch)

    @classmethod
    def _kept(
        cls, ordered: Tensor, order: Tensor, is_top: Tensor, probabilities: Tensor, batch: SamplingBatch
    ) -> _Prefix:
        # top-p applies to the tokens that top-k kept, as is conventional.
        before = _running_sum(probabilities) - probabilities
        keep = is_top & (before < batch.top_p[:, None])
        keep &= ordered.exp() >= batch.min_p[:, None] * ordered[:, :1].exp()
        keep[:, 0] = True
        return cls(ordered, order, before, keep)

    def is_enough(self, batch: SamplingBatch) -> Tensor:
        """Per row, whether a longer prefix would keep the same tokens, whatever its rounding errors."""
        is_short = (batch.top_k > 0) & (batch.top_k <= NARROW)
        rank = torch.arange(NARROW, device=self.before.device)
        is_clear = (self.before - batch.top_p[:, None]).abs() > (rank + _LEAST_TERMS) * _ROUNDING
        is_certain = is_clear.all(dim=-1)
        return is_short | ((batch.top_k == 0) & ~self.keep[:, -1] & (is_certain | (batch.top_p == 1)))

    def put_into(self, logprobs: Tensor) -> Tensor:
        """The renormalised log-probs of all tokens, in the order of their ids."""
        kept = torch.where(self.keep, self.ordered, -torch.inf).log_softmax(dim=-1)
        return torch.full_like(logprobs, -torch.inf).scatter(-1, self.order, kept)


def _running_sum(probabilities: Tensor) -> Tensor:
    """Along every row. In a run that asks torch for deterministic kernels, of integers: there is none for floats."""
    if not (probabilities.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return probabilities.cumsum(dim=-1)
    in_steps = (probabilities.double() * 2.0**52).long().cumsum(dim=-1)
    return (in_steps.double() * 2.0**-52).to(probabilities.dtype)


def _most_likely(logprobs: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The ``width`` largest values of each row in descending order, and their ids; equal values by ascending id."""
    vocabulary = logprobs.shape[-1]
    # topk may return any of several equal values. These numbers are all different: a float32 as an integer with the
    # same order, then the id.
    bits = (logprobs + 0.0).view(torch.int32).to(torch.int64)  # + 0.0 because -0.0 equals 0.0
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(vocabulary - 1, -1, -1, device=logprobs.device)
    keys = (bits * 2**32 + ids).topk(width, dim=-1).values
    order = vocabulary - 1 - (keys & 0xFFFFFFFF)
    return logprobs.gather(-1, order), order
