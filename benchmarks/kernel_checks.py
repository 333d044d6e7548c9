"""Each kernel against float64, and against itself where its bits must not depend on the batch."""

from __future__ import annotations

import torch
from kernel_parts import (
    DEVICE,
    EPS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    PAGE,
    PRODUCTS,
    QKV,
    VOCABULARY,
    Pages,
    Values,
    norm,
    randn,
    relative_error,
)
from torch.nn import functional as F

from headwater.engine.kernels import prefill_attention
from headwater.engine.kernels.activation import silu_and_mul
from headwater.engine.kernels.linear import invariant_linear, possible_slices, split_linear
from headwater.engine.kernels.norm import add_rms_norm, rms_norm, sum_add_rms_norm
from headwater.engine.kernels.rope import rope_and_store
from headwater.engine.kernels.sampling import sample_tokens
from headwater.engine.sampler import uniforms


def check_norms_and_activations() -> Values:
    x, residual, weight, gate_up = randn(64, HIDDEN), randn(64, HIDDEN), randn(HIDDEN), randn(64, 2 * INTERMEDIATE)
    total, (gate, up) = x + residual, gate_up.double().chunk(2, -1)
    return {
        "rms_norm_error": relative_error(rms_norm(x, weight, EPS), norm(x, weight)),
        "add_rms_norm_error": relative_error(add_rms_norm(x, residual, weight, EPS), norm(total, weight)),
        "residual_same_bits": torch.equal(total, residual),
        "silu_error": relative_error(silu_and_mul(gate_up), F.silu(gate) * up),
    }


def check_rope(norms: bool) -> Values:
    pages, qkv = Pages([PAGE] * 8), randn(64, QKV)
    angles = torch.rand(640, HEAD_DIM // 2, device=DEVICE).repeat(1, 2) * 6.3
    positions, slots = torch.randint(640, (64,), device=DEVICE), PAGE + torch.randperm(8 * PAGE, device=DEVICE)[:64]
    weights = (randn(HEAD_DIM), randn(HEAD_DIM)) if norms else (None, None)
    tables = angles.cos(), angles.sin()
    query = rope_and_store(qkv, *tables, positions, slots, pages.keys, pages.values, HEADS, *weights, EPS)
    stored_key, stored_value = (each[slots // PAGE, :, slots % PAGE] for each in (pages.keys, pages.values))
    *heads, value = qkv.view(64, -1, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    cos, sin = (each[positions].double()[:, None] for each in tables)
    errors = []
    for actual, head, weight in zip((query, stored_key), heads, weights, strict=True):
        wide = head.double() if weight is None else norm(head, weight)
        low, high = wide.chunk(2, -1)
        errors.append(relative_error(actual, wide * cos + torch.cat([-high, low], -1) * sin))
    return {"query_error": errors[0], "key_error": errors[1], "value_same_bits": torch.equal(stored_value, value)}


def check_decode(dtype: torch.dtype, shape: tuple[int, int, int], splits: int) -> Values:
    pages = Pages([0, 1, 63, 64, 65, 384, 640, 2500], *shape[1:], dtype)
    q = randn(8, shape[0], shape[2], dtype=dtype)
    actual = pages.decode(q, splits)
    expected = torch.cat([pages.attend(row, q[row : row + 1]) for row in range(1, 8)])
    return {"error": relative_error(actual[1:], expected), "empty_row_is_zero": not bool(actual[0].any())}


def check_prefill(dtype: torch.dtype, shape: tuple[int, int, int]) -> Values:
    pages, q = Pages([300, 77], *shape[1:], dtype), randn(377, shape[0], shape[2], dtype=dtype)
    config = prefill_attention.default_config(shape[2], q.element_size())
    whole = pages.prefill(q, [(0, 300, 300), (1, 77, 77)], config)()
    chunks = pages.prefill(q[:300], [(0, 100, 100), (0, 1, 101), (0, 199, 300)], config)()
    single = pages.prefill(q[:300], [(0, 1, context) for context in range(1, 301)], config)()
    error = relative_error(whole, torch.cat([pages.attend(0, q[:300]), pages.attend(1, q[300:])]))
    same = torch.equal(whole[:300], chunks), torch.equal(whole[:300], single)
    return {"error": error, "chunks_same_bits": same[0], "single_same_bits": same[1]}


def check_sampler(dtype: torch.dtype) -> Values:
    logits = randn(512, VOCABULARY, dtype=dtype, scale=3.0)
    logits[:, 1000:3000] = -torch.inf
    keys, positions = torch.randint(-(2**62), 2**62, (512,), device=DEVICE), torch.arange(512, device=DEVICE)
    temperature = torch.tensor([0.0, 0.8, 0.8, 0.8], device=DEVICE).repeat(128)
    inputs = logits, keys, positions, temperature
    tokens, logprobs = sample_tokens(*inputs)
    reference = (logits.double() / torch.where(temperature == 0, 1.0, temperature)[:, None].double()).log_softmax(-1)
    cumulative = reference.exp().cumsum(-1)
    drawn = torch.searchsorted(cumulative, uniforms(keys, positions)[:, None] * cumulative[:, -1:], right=True)[:, 0]
    same = tokens == torch.where(temperature == 0, logits.argmax(-1), drawn)
    alone = zip(*(sample_tokens(*(each[row : row + 1] for each in inputs)) for row in range(8)), strict=True)
    return {
        # Float32 sums may cross a uniform a token earlier or later than float64 ones; greedy rows have no excuse.
        "drawn_otherwise_error": 1.0 - float(same.double().mean()),
        "greedy_same": bool(same[::4].all()),
        "logprob_error": float((logprobs - reference.gather(-1, tokens[:, None])[:, 0]).abs().max()),
        "alone_same_bits": all(map(torch.equal, map(torch.cat, alone), (tokens[:8], logprobs[:8]))),
    }


def check_invariant_linear() -> Values:
    x, weight, bias = randn(1000, HIDDEN), randn(QKV, HIDDEN, scale=0.03), randn(QKV)
    whole = invariant_linear(x, weight, bias)
    fewer = [invariant_linear(x[:rows], weight, bias) for rows in (1, 8, 64, 65, 256)]
    error = relative_error(whole, F.linear(x.double(), weight.double(), bias.double()))
    return {"error": error, "same_bits": all(torch.equal(whole[: len(each)], each) for each in fewer)}


def check_split_linear(product: str) -> Values:
    outputs, inputs = PRODUCTS[product]
    x, weight, bias = randn(256, inputs), randn(outputs, inputs, scale=0.03), randn(outputs)
    before, norm_weight = randn(256, outputs), randn(outputs)
    exact = before.double() + F.linear(x.double(), weight.double(), bias.double())
    errors = {}
    for slices in possible_slices(inputs)[1:]:
        residual = before.clone()
        actual = sum_add_rms_norm(split_linear(x, weight, slices), bias, residual, norm_weight, EPS)
        errors[f"sum_error_{slices}"] = relative_error(residual, exact)
        errors[f"norm_error_{slices}"] = relative_error(actual, norm(exact, norm_weight))
    return errors
