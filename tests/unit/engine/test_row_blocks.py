"""Sampling in blocks of a fixed number of rows."""

from __future__ import annotations

import torch
from cases import case

from headwater.core.requests import SamplingParams
from headwater.engine.runners.fixed_rows import NUM_ROWS, padded, sample_in_blocks
from headwater.engine.sampler import SamplingBatch, sample

SETTINGS = ({}, {"temperature": 0.0}, {"top_k": 7}, {"temperature": 0.7, "top_p": 0.8}, {"min_p": 0.05})


def inputs(rows: int, vocabulary: int) -> tuple[torch.Tensor, list[SamplingParams], list[int], torch.Tensor]:
    logits = 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(rows))
    params = [SamplingParams(1, **SETTINGS[row % len(SETTINGS)]) for row in range(rows)]
    return logits, params, [31 * row for row in range(rows)], torch.arange(rows)


def batch_of(params: list[SamplingParams], keys: list[int]) -> SamplingBatch:
    return SamplingBatch.build(params, keys, torch.device("cpu"))


def test_the_last_block_is_filled_with_zeros():
    assert padded(torch.ones(3, 2)).sum(dim=1).tolist() == [2.0] * 3 + [0.0] * (NUM_ROWS - 3)
    assert padded(torch.ones(NUM_ROWS)).tolist() == [1.0] * NUM_ROWS


def test_what_is_drawn_is_what_the_plain_sampler_draws():
    for rows in [1, NUM_ROWS, NUM_ROWS + 5]:
        for vocabulary in [256, 300]:
            with case(rows, vocabulary):
                logits, params, keys, positions = inputs(rows, vocabulary)
                tokens, logprobs = sample_in_blocks(logits, batch_of(params, keys), positions)
                expected_tokens, expected_logprobs = sample(logits, batch_of(params, keys), positions)
                assert torch.equal(tokens, expected_tokens)
                torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-5, atol=1e-5)


def test_a_row_has_the_same_bits_alone_and_at_any_place():
    logits, params, keys, positions = inputs(2 * NUM_ROWS + 9, 301)
    tokens, logprobs = sample_in_blocks(logits, batch_of(params, keys), positions)
    for row in (0, 1, 2, NUM_ROWS + 3, 2 * NUM_ROWS + 4):
        one = slice(row, row + 1)
        token, logprob = sample_in_blocks(logits[one], batch_of(params[one], keys[one]), positions[one])
        assert torch.equal(token[0], tokens[row])
        assert torch.equal(logprob[0], logprobs[row])
