"""Sampling."""

from __future__ import annotations

import torch
from cases import case
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.requests import SamplingParams
from headwater.engine.sampler import SamplingBatch, _draw, _Prefix, sample, uniforms

CPU = torch.device("cpu")


def batch_of(rows: int, **settings) -> SamplingBatch:
    params = SamplingParams(max_new_tokens=1, **settings)
    return SamplingBatch.build([params] * rows, [17 * row for row in range(rows)], CPU)


def draw(logits: torch.Tensor, rows: int, **settings):
    batch = batch_of(rows, **settings)
    return sample(logits.expand(rows, -1), batch, torch.zeros(rows, dtype=torch.int64))


def test_uniforms_match_splitmix64_in_plain_python():
    def reference(key: int, position: int) -> float:
        wrap = (1 << 64) - 1
        state = (key + (position + 1) * 0x9E3779B97F4A7C15) & wrap
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & wrap
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & wrap
        return ((state ^ (state >> 31)) >> 11) * 2.0**-53

    keys, positions = [0, 1, -1, 2**63 - 1, -(2**63), 123456789], [0, 5, 7, 1000, 3, 2]
    actual = uniforms(torch.tensor(keys), torch.tensor(positions)).tolist()
    assert actual == [reference(key, position) for key, position in zip(keys, positions, strict=True)]


def test_uniforms_are_uniform():
    values = uniforms(torch.arange(10_000), torch.zeros(10_000, dtype=torch.int64))
    counts = torch.histc(values.float(), bins=20, min=0, max=1)
    assert ((counts - 500) ** 2 / 500).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001


def test_tokens_follow_the_distribution():
    for temperature in [0.5, 1.0, 2.0]:
        with case(temperature):
            logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, 0.5]])
            rows = 20_000
            tokens, logprobs = draw(logits, rows, temperature=temperature)
            probabilities = (logits[0] / temperature).softmax(-1)
            expected = probabilities * rows
            counts = torch.bincount(tokens, minlength=5)
            assert ((counts - expected) ** 2 / expected).sum() < 18.5  # 4 degrees of freedom, p = 0.001
            torch.testing.assert_close(logprobs, probabilities.log()[tokens])


def test_greedy_takes_the_likeliest():
    tokens, logprobs = draw(torch.tensor([[0.0, 3.0, 1.0]]), 4, temperature=0.0)
    assert tokens.tolist() == [1] * 4
    torch.testing.assert_close(logprobs[0], torch.tensor([0.0, 3.0, 1.0]).log_softmax(-1)[1])


def test_truncation_keeps_exactly_these():
    for truncation, kept in [
        ({"top_k": 2}, {3, 0}),
        ({"top_p": 0.5}, {3}),
        ({"top_p": 0.75}, {3, 0}),
        ({"min_p": 0.3}, {3, 0}),
        ({"top_k": 1}, {3}),
    ]:
        with case(truncation, kept):
            logits = torch.tensor([[1.0, 0.0, -1.0, 2.0]])  # probabilities .24 .09 .03 .64
            tokens, logprobs = draw(logits, 2000, **truncation)
            assert set(tokens.tolist()) == kept
            alone = torch.full((4,), -torch.inf)
            alone[list(kept)] = logits[0, list(kept)]
            torch.testing.assert_close(logprobs, alone.log_softmax(-1)[tokens])


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**31), st.integers(1, 40))
def test_a_row_does_not_depend_on_its_neighbours(seed, rows):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 50, generator=generator)
    params = [SamplingParams(1, temperature=0.7, top_p=0.9 if row % 2 else 1.0) for row in range(rows)]
    keys = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    positions = torch.arange(rows)
    together, _ = sample(logits, SamplingBatch.build(params, keys.tolist(), CPU), positions)
    for row in range(rows):
        batch = SamplingBatch.build([params[row]], [int(keys[row])], CPU)
        alone, _ = sample(logits[row : row + 1], batch, positions[row : row + 1])
        assert alone.item() == together[row].item()


def test_a_token_without_probability_is_never_drawn():
    logits = torch.full((1, 6), -torch.inf)
    logits[0, [1, 4]] = 0.0
    tokens, _ = draw(logits, 5000)
    assert set(tokens.tolist()) == {1, 4}


def test_a_row_without_a_distribution_draws_with_logprob_nan():
    for vocabulary in [6, 300]:
        for cut in [{}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.0}]:
            for wrong in [torch.nan, torch.inf]:
                with case(vocabulary, cut, wrong):
                    logits = torch.zeros(2, vocabulary)
                    logits[1, 4] = wrong
                    tokens, logprobs = sample(logits, batch_of(2, **cut), torch.zeros(2, dtype=torch.int64))
                    assert (tokens >= 0).all()
                    assert (tokens < vocabulary).all()
                    assert logprobs.isnan().tolist() == [False, True]


def completely_sorted(logits: torch.Tensor, batch: SamplingBatch, positions: torch.Tensor):
    """``sample`` with every row of the batch sorted completely."""
    cut = _Prefix.whole(logits.log_softmax(-1), batch)
    return _draw(cut.put_into(logits), batch, positions)


def test_truncation_has_the_same_bits_however_many_tokens_and_rows_are_sorted(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    wholly = []
    whole = _Prefix.whole.__func__

    def counted(cls, logprobs, batch):
        wholly.append(len(logprobs))
        return whole(cls, logprobs, batch)

    for scale, rounded in [(0.1, False), (3.0, False), (8.0, False), (3.0, True)]:
        for cut in [{"top_k": 5}, {"top_k": 2000}, {"top_p": 0.9}, {"top_p": 0.9999}, {"min_p": 0.05}]:
            with case(scale, rounded, cut):
                logits = torch.randn(8, 6000, generator=generator) * scale
                logits = logits.round() if rounded else logits  # many tokens are equally likely
                params = [SamplingParams(1, **(cut if row % 2 else {})) for row in range(8)]
                positions = torch.arange(8)
                batch = SamplingBatch.build(params, list(range(8)), CPU)
                rows = torch.arange(1, 8, 2)
                expected = completely_sorted(logits[rows], batch.of_rows(rows), positions[rows])
                with monkeypatch.context() as patch:
                    patch.setattr(_Prefix, "whole", classmethod(counted))
                    wholly.clear()
                    tokens, logprobs = sample(logits, batch, positions)
                assert torch.equal(tokens[rows], expected[0])
                assert torch.equal(logprobs[rows], expected[1])
                others, _ = sample(logits[::2], SamplingBatch.build(params[::2], [0, 2, 4, 6], CPU), positions[::2])
                assert torch.equal(tokens[::2], others)
                assert sum(wholly) <= 4, "rows without truncation are never sorted"
                if cut == {"top_k": 5} or (scale == 8.0 and cut == {"top_p": 0.9} and not rounded):
                    assert sum(wholly) <= 1, "the most likely tokens are enough"
