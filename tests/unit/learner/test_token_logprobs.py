"""Chunked log-probs and entropies against the plain formula."""

from __future__ import annotations

import types
import weakref

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_logits_save_a_product_per_chunk_and_change_no_bit(monkeypatch, dtype):
    monkeypatch.setitem(module._CHUNK_ELEMENTS, "cpu", 50 * 7)  # three chunks of 7, 7 and 6 tokens
    products, logits = [], module._logits
    monkeypatch.setattr(module, "_logits", lambda *inputs: products.append(len(inputs[0])) or logits(*inputs))
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(*shape, generator=generator).to(dtype) for shape in ((20, 8), (50, 8), (50,))]
    targets = torch.randint(0, 50, (20,), generator=generator)
    upstream = torch.randn(2, 20, generator=generator)
    results = {}
    num_bytes = 20 * 50 * 4
    for kept_bytes in (num_bytes, num_bytes - 1):
        inputs = [each.clone().requires_grad_() for each in leaves]
        outputs = token_logprobs(*inputs, targets, 0.6, kept_bytes=kept_bytes)
        sum((out * up).sum() for out, up in zip(outputs[:2], upstream, strict=True)).backward()
        results[kept_bytes] = [*outputs, *(each.grad for each in inputs)]
        assert products == ([7, 7, 6] if kept_bytes == num_bytes else [7, 7, 6] * 2)
        products.clear()
    assert all(torch.equal(*pair) for pair in zip(*results.values(), strict=True))


def test_chunks_are_kept_while_there_is_room(monkeypatch):
    monkeypatch.setitem(module._CHUNK_ELEMENTS, "cpu", 50 * 7)  # three chunks of 7, 7 and 6 tokens
    products, logits = [], module._logits
    monkeypatch.setattr(module, "_logits", lambda *inputs: products.append(len(inputs[0])) or logits(*inputs))
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(*shape, generator=generator) for shape in ((20, 8), (50, 8))]
    targets = torch.randint(0, 50, (20,), generator=generator)
    results = []
    for room, computed in (([], [7, 7, 6] * 2), ([True, False, True], [7, 7, 6, 7]), ([True] * 3, [7, 7, 6])):
        monkeypatch.setattr(module, "_has_room", lambda *_, room=room: bool(room) and room.pop(0))
        inputs = [each.clone().requires_grad_() for each in leaves]
        outputs = token_logprobs(*inputs, None, targets, 0.6, kept_bytes=0, keeps_more=True)
        (outputs.logprobs.sum() + outputs.entropy.sum()).backward()
        results.append([*outputs, *(each.grad for each in inputs)])
        assert products == computed
        products.clear()
    for others in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(others, results[0], strict=True))


def test_room_is_what_stays_free_for_the_rest_of_a_pass(monkeypatch):
    weight = torch.empty(100, 8, device="meta")
    gpu = types.SimpleNamespace(device=types.SimpleNamespace(type="cuda"), shape=weight.shape, numel=weight.numel)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(total_memory=10_000))
    needed = 2 * 7 * 100 * 4 + 8 * 800 + 1000
    for free, has_room in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(module, "free_for_large_tensors", lambda _, free=free: free)
        assert module._has_room(gpu, 7) == has_room
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(module, "free_for_large_tensors", lambda _: 1 << 40)
    assert not module._has_room(gpu, 7), "while a CUDA graph is recorded"
    assert not module._has_room(weight, 7), "not on a GPU"


def test_a_pass_without_gradients_keeps_no_logits(monkeypatch):
    """At most one chunk is still there when another is computed."""
    monkeypatch.setitem(module._CHUNK_ELEMENTS, "cpu", 50 * 10)
    alive, logits = [], module._logits

    def watched(*inputs):
        assert sum(each() is not None for each in alive) <= 1
        made = logits(*inputs)
        alive.append(weakref.ref(made))
        return made

    monkeypatch.setattr(module, "_logits", watched)
    hidden, weight = torch.randn(30, 8), torch.randn(50, 8, requires_grad=True)
    with torch.no_grad():
        token_logprobs(hidden, weight, None, torch.zeros(30, dtype=torch.int64), 1.0)
    assert len(alive) == 3


def test_a_frozen_head_gets_no_gradient():
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(16, 8)
    token_logprobs(hidden, weight, None, torch.zeros(4, dtype=torch.int64), 1.0).logprobs.sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None
