"""Chunked log-probs and entropies against the plain formula."""

from __future__ import annotations

import pytest
import torch

from headwater.learner import packed_module as module
from headwater.learner.packed_module import token_logprobs


def plain(hidden, weight, bias, targets, temperature):
    logits = hidden @ weight.T / temperature
    if bias is not None:
        logits = (hidden @ weight.T + bias) / temperature
    logprobs = logits.log_softmax(-1)
    return (
        logprobs.gather(-1, targets[:, None])[:, 0],
        -(logprobs.exp() * logprobs).sum(-1),
        logprobs.exp().square().sum(-1),
    )


@pytest.mark.parametrize("chunk_elements", [1 << 20, 50 * 7, 50])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients(monkeypatch, chunk_elements, with_bias, temperature):
    monkeypatch.setitem(module._CHUNK_ELEMENTS, "cpu", chunk_elements)
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(*shape, generator=generator, dtype=torch.float32) for shape in ((20, 8), (50, 8), (50,))]
    targets = torch.randint(0, 50, (20,), generator=generator)
    upstream = torch.randn(2, 20, generator=generator)
    results = []
    for function in (plain, token_logprobs):
        hidden, weight, bias = (each.clone().requires_grad_() for each in leaves)
        outputs = function(hidden, weight, bias if with_bias else None, targets, temperature)
        sum((out * up).sum() for out, up in zip(outputs[:2], upstream, strict=True)).backward()
        results.append([*outputs, hidden.grad, weight.grad] + ([bias.grad] if with_bias else []))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_a_frozen_head_gets_no_gradient():
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(16, 8)
    token_logprobs(hidden, weight, None, torch.zeros(4, dtype=torch.int64), 1.0).logprobs.sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None
