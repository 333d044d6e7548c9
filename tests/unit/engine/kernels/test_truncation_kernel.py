"""Sampling with top-k, top-p and min-p on the device."""

from __future__ import annotations

import pytest
import torch
from cases import case
from engine.kernels.support import DEVICE, randn

from headwater.core.requests import SamplingParams
from headwater.engine.kernels.sampling import sample_tokens
from headwater.engine.kernels.truncation import sample_truncated
from headwater.engine.sampler import SamplingBatch, distribution, sample

# The interpreter is slow: small vocabularies, few pivots and few chunks, but more than one.
CHUNK = 64
CUTS = (
    {"top_k": 5},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.6, "top_p": 0.97, "min_p": 0.01},
)
MORE_CUTS = (
    {"top_k": 1},
    {"top_k": 60, "min_p": 0.1},
    {"top_k": 1000},
    {"top_p": 1e-6},
    {"top_p": 0.9999},
    {"temperature": 1.7, "top_k": 9},
    {"temperature": 0.05, "top_k": 70, "top_p": 0.999},
)
LOGITS = {
    "flat": lambda noise: 0.1 * noise,
    "usual": lambda noise: 2 * noise,
    "peaked": lambda noise: 8 * noise,
    "ties": lambda noise: (2 * noise).round(),
    "bfloat16": lambda noise: noise.bfloat16(),
}


def batch_of(*cuts: dict[str, float]) -> SamplingBatch:
    keys = torch.randint(-(2**62), 2**62, (len(cuts),), generator=torch.Generator().manual_seed(3))
    return SamplingBatch.build([SamplingParams(1, **cut) for cut in cuts], keys.tolist(), DEVICE)


def draw(logits: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor | None = None, **sizes: int):
    sizes = {"chunk": CHUNK, "num_pivots": 4, "num_slots": 16, **sizes}
    rows = torch.arange(len(logits), device=DEVICE) if rows is None else rows
    filters = batch.top_k, batch.top_p, batch.min_p
    positions = torch.arange(len(logits), device=DEVICE) * 7
    return sample_truncated(logits, batch.keys, positions, batch.temperature, filters, rows, **sizes)


def compare(logits: torch.Tensor, cuts: tuple[dict[str, float], ...], **sizes: int) -> None:
    """Tokens and log-probs are the plain sampler's."""
    batch = batch_of(*cuts)
    tokens, logprobs = draw(logits, batch, **sizes)
    expected, expected_logprobs = sample(logits, batch, torch.arange(len(logits), device=DEVICE) * 7)
    assert tokens.tolist() == expected.tolist()
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-4, atol=1e-5)


def test_tokens_and_logprobs_are_those_of_the_plain_sampler():
    for seed, (kind, cuts) in enumerate((("usual", CUTS[:3]), ("bfloat16", CUTS[3:]))):
        with case(kind):
            compare(LOGITS[kind](randn(len(cuts), 120, seed=seed)), cuts)


def test_more_open_tokens_than_slots_change_nothing():
    compare(LOGITS["ties"](randn(3, 100, seed=5)), CUTS[:2] + CUTS[3:4], num_slots=1)


def test_the_sizes_of_the_engine_and_a_large_vocabulary():
    compare(3 * randn(1, 151_936, seed=1), ({"top_p": 0.95},), chunk=16384, num_pivots=8, num_slots=128)


def test_of_equal_tokens_the_first_are_kept():
    logits = torch.zeros(3, 130, device=DEVICE)
    logits[:, 7] = -1.0
    logits[:, 100] = 1.0
    cuts = {"top_k": 68}, {"top_k": 3}, {"top_p": 0.016}
    batch = batch_of(*cuts)
    kept = distribution(logits, batch).isfinite()
    assert kept.sum(dim=-1).tolist() == [68, 3, 1]
    tokens, logprobs = draw(logits, batch, num_slots=128)
    assert kept[torch.arange(3), tokens].all()
    expected = distribution(logits, batch).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)


def test_other_rows_keep_their_bits():
    """Rows that are not listed, rows without a filter, greedy rows, and rows without a distribution."""
    logits = randn(6, 100, seed=4)
    logits[3, 30] = torch.nan
    logits[4, 30] = torch.inf
    logits[5] = -torch.inf
    batch = batch_of({"top_k": 2}, {}, {"temperature": 0.0, "top_k": 3}, {"top_p": 0.5}, {"top_k": 3}, {"top_p": 0.5})
    positions = torch.arange(6, device=DEVICE) * 7
    expected, expected_logprobs = sample_tokens(logits, batch.keys, positions, batch.temperature, chunk=CHUNK)
    tokens, logprobs = draw(logits, batch, torch.arange(1, 6, device=DEVICE))
    assert torch.equal(tokens[:3], expected[:3])
    assert torch.equal(logprobs[:3], expected_logprobs[:3])
    assert logprobs.isnan().tolist() == [False, False, False, True, True, True]
    assert ((tokens >= 0) & (tokens < 100)).all()


def test_forbidden_tokens_are_never_drawn_and_too_few_tokens_are_all_kept():
    logits = torch.full((3, 100), -torch.inf, device=DEVICE)
    allowed = torch.tensor([3, 40, 90], device=DEVICE)
    logits[:, allowed] = torch.tensor([0.0, -0.5, -90.0], device=DEVICE)  # the last one is found only farther below
    compare(logits, ({"top_k": 50}, {"top_p": 0.999}, {"top_k": 2, "top_p": 0.9}))


def test_a_row_does_not_depend_on_the_others():
    logits = randn(2, 100, seed=8)
    batch = batch_of({"top_k": 3}, {"top_p": 0.9})
    tokens, logprobs = draw(logits, batch, torch.tensor([1, 0], device=DEVICE))
    again, logprobs_again = draw(logits, batch, torch.tensor([1], device=DEVICE))
    assert torch.equal(tokens[1], again[1])
    assert torch.equal(logprobs[1], logprobs_again[1])


@pytest.mark.slow
def test_many_distributions_and_filters():
    cuts = (*CUTS, *MORE_CUTS)
    for seed, (kind, make) in enumerate(LOGITS.items()):
        for num_slots in (32, 2):
            with case(kind, num_slots):
                compare(make(randn(len(cuts), 300, seed=seed)), cuts, chunk=128, num_slots=num_slots)
