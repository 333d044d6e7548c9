"""Sampling on the device."""

from __future__ import annotations

from functools import partial

import torch
from cases import case
from engine.kernels.support import DEVICE, randn

from headwater.engine.kernels.sampling import sample_tokens as sample_in_chunks
from headwater.engine.sampler import uniforms

# Small chunks, so that small vocabularies span several. The interpreter is slow.
sample_tokens = partial(sample_in_chunks, chunk=64)


def keys_and_positions(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.randint(-(2**62), 2**62, (rows,), generator=torch.Generator().manual_seed(2))
    return keys.to(DEVICE), torch.arange(rows, device=DEVICE) * 7


def test_tokens_and_logprobs_match_the_reference_sampler():
    for vocabulary, dtype, temperature in [
        (5, torch.float32, 1.0),
        (64, torch.bfloat16, 0.4),
        (301, torch.float32, 0.4),
        (301, torch.bfloat16, 1.0),
    ]:
        with case(vocabulary, dtype, temperature):
            rows = 5
            logits = randn(rows, vocabulary, dtype=dtype, seed=1)
            keys, positions = keys_and_positions(rows)
            tokens, logprobs = sample_tokens(logits, keys, positions, torch.full((rows,), temperature, device=DEVICE))
            reference = torch.log_softmax(logits.double() / temperature, dim=-1)
            # Rounding may move a boundary to the other side of the uniform number, in about one row in a thousand.
            cumulative = reference.exp().cumsum(dim=-1)
            drawn = torch.searchsorted(cumulative, uniforms(keys, positions)[:, None] * cumulative[:, -1:], right=True)
            assert (tokens == drawn[:, 0]).sum() >= rows - 1
            expected = reference.gather(-1, tokens[:, None])[:, 0]
            torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)


def test_greedy_takes_the_first_of_the_likeliest():
    logits = randn(3, 300, seed=4)
    logits[0, [17, 18, 200]] = 9.0
    logits[1, [299, 150]] = 9.0
    logits[2, 0] = 9.0
    keys, positions = keys_and_positions(3)
    tokens, logprobs = sample_tokens(logits, keys, positions, torch.zeros(3, device=DEVICE))
    assert tokens.tolist() == [17, 150, 0]
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1).gather(-1, tokens[:, None])[:, 0])


def test_a_uniform_number_selects_the_token_whose_share_of_the_distribution_it_falls_into():
    rows = 20
    logits = torch.tensor([0.5, 0.3, 0.0, 0.2], device=DEVICE).log().expand(rows, -1).contiguous()
    keys = torch.arange(rows, device=DEVICE)
    tokens, _ = sample_in_chunks(logits, keys, torch.zeros_like(keys), torch.ones(rows, device=DEVICE), chunk=4)
    drawn = uniforms(keys, torch.zeros_like(keys)).tolist()
    assert tokens.tolist() == [0 if each < 0.5 else 1 if each < 0.8 else 3 for each in drawn]
    assert set(tokens.tolist()) == {0, 1, 3}


def test_forbidden_tokens_are_never_drawn():
    rows, vocabulary = 8, 300
    logits = torch.full((rows, vocabulary), -torch.inf, device=DEVICE)
    allowed = torch.tensor([3, 63, 128], device=DEVICE)
    # The last allowed token is so unlikely that its probability underflows in float32.
    logits[:, allowed] = torch.tensor([0.0, -1.0, -200.0], device=DEVICE)
    keys, positions = keys_and_positions(rows)
    tokens, logprobs = sample_tokens(logits, keys, positions, torch.ones(rows, device=DEVICE))
    assert torch.isin(tokens, allowed).all()
    assert logprobs.isfinite().all()
    only = torch.full((1, vocabulary), -torch.inf, device=DEVICE)
    only[0, 299] = -5.0
    token, logprob = sample_tokens(only, keys[:1], positions[:1], torch.ones(1, device=DEVICE))
    assert (token.item(), logprob.item()) == (299, 0.0)


def test_the_default_chunk():
    logits = randn(1, 5000, seed=9)
    keys, positions = keys_and_positions(1)
    token, logprob = sample_in_chunks(logits, keys, positions, torch.ones(1, device=DEVICE))
    torch.testing.assert_close(logprob, torch.log_softmax(logits, -1)[0, token], rtol=1e-5, atol=1e-5)


def test_a_row_does_not_depend_on_the_others():
    logits = randn(4, 150, seed=8)
    keys, positions = keys_and_positions(4)
    temperature = torch.tensor([1.0, 0.0, 0.7, 1.3], device=DEVICE)
    tokens, logprobs = sample_tokens(logits, keys, positions, temperature)
    for row in range(4):
        one = slice(row, row + 1)
        token, logprob = sample_tokens(logits[one], keys[one], positions[one], temperature[one])
        assert token == tokens[row]
        assert torch.equal(logprob[0], logprobs[row])


def test_a_row_without_a_distribution_draws_with_logprob_nan():
    logits = randn(6, 150, seed=4)
    logits[[1, 2], 130] = torch.nan
    logits[[3, 4], 130] = torch.inf
    temperature = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0], device=DEVICE)
    tokens, logprobs = sample_tokens(logits, *keys_and_positions(6), temperature)
    assert (tokens >= 0).all()
    assert (tokens < 150).all()
    assert logprobs.isnan().tolist() == [False, True, True, True, True, False]
