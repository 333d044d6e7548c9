"""The layers for few rows in an engine on a GPU: under CUDA graphs, against full passes and against the plain path."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine.engine_parts import build, full_pass, request, running, tokens_of
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from headwater.engine.kernels.decode_attention import paged_decode_attention
from headwater.engine.kernels.skinny_sums import add_product, make_arrived, sum_config
from headwater.engine.runners import cuda as cuda_runner

SMOLLM2 = {
    "vocab_size": 512,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.04,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
QWEN2 = {**SMOLLM2, "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SMOLLM2),
    "qwen2": lambda: Qwen2Config(**QWEN2, use_sliding_window=False),
    "qwen3": lambda: Qwen3Config(**SMOLLM2),
}
REQUESTS = [request(tokens_of(20 + 37 * key), key, max_new_tokens=64) for key in range(16)]


def model_of(kind: str, dtype: torch.dtype = torch.bfloat16):
    return build(CONFIGS[kind]()).to(dtype).to("cuda")


def generated(kind: str, num_requests: int):
    """Responses, and whether the layers for few rows were used."""
    with running(model_of(kind), kv_cache_gib=0.5) as engine:
        return engine.generate(REQUESTS[:num_requests]), engine._runner._skinny is not None


def gaps(responses, model) -> torch.Tensor:
    """Distances of log-probs to those of a full pass in float32, with the same weights."""
    pairs = [
        (ours, exact)
        for response, asked in zip(responses, REQUESTS, strict=False)
        for ours, exact in zip(response.output_logprobs, full_pass(model, response, asked.sampling), strict=True)
    ]
    ours, exact = torch.tensor(pairs).T
    return (ours - exact).abs()


@pytest.fixture
def skinny(monkeypatch):
    monkeypatch.setattr(cuda_runner, "SKINNY_ROWS", 16)


@pytest.mark.parametrize("num_requests", [1, 3, 8, 16])
@pytest.mark.parametrize("kind", CONFIGS)
def test_as_near_to_exact_log_probs_as_the_plain_path(kind, num_requests, skinny, monkeypatch):
    ours, was_used = generated(kind, num_requests)
    assert was_used
    monkeypatch.setattr(cuda_runner, "SKINNY_ROWS", 0)
    plain, was_used = generated(kind, num_requests)
    assert not was_used
    exact = model_of(kind).float()
    our_gap, plain_gap = gaps(ours, exact), gaps(plain, exact)
    # Different roundings lead to different tokens, so the two means are of different samples.
    assert our_gap.mean() < (1.2 + 4 / len(our_gap) ** 0.5) * plain_gap.mean()
    assert our_gap.max() < 0.5


@pytest.mark.parametrize("dependent", [False, True])
def test_sums_have_the_same_bits_whichever_program_is_last(dependent):
    config = replace(sum_config(1536, 8960), dependent=dependent)
    x, weight = (0.1 * torch.randn(*shape, device="cuda").bfloat16() for shape in ((8, 8960), (1536, 8960)))
    residual, norm_weight = torch.randn(8, 1536, device="cuda"), torch.ones(1536, device="cuda").bfloat16()
    q, keys, values = (
        torch.randn(*each, device="cuda").bfloat16() for each in ((8, 12, 128), *2 * ((65, 2, 64, 128),))
    )
    table = 1 + torch.arange(64, device="cuda", dtype=torch.int32).view(8, 8)
    contexts = torch.tensor([512, 511, 1, 0, 64, 65, 300, 450], device="cuda", dtype=torch.int32)
    arrived = make_arrived(torch.device("cuda"))
    expected = residual + x.float() @ weight.float().T
    attended = paged_decode_attention(q, keys, values, table, contexts, 0.09, num_splits=8)
    seen = []
    for _ in range(200):
        total = residual.clone()
        prepared = add_product(x, weight, None, total, norm_weight, 1e-6, arrived, config)
        together = paged_decode_attention(q, keys, values, table, contexts, 0.09, num_splits=8, arrived=arrived)
        seen.append((total, prepared.scaled, prepared.squares, together))
    torch.testing.assert_close(seen[0][0], expected, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(seen[0][3], attended, rtol=1e-2, atol=1e-3)
    for each in seen[1:]:
        assert all(map(torch.equal, each, seen[0]))
    assert not arrived.any()


def test_more_rows_use_the_plain_path_and_rows_that_end_come_back(skinny):
    asked = [request(tokens_of(9 + key), key, max_new_tokens=8 + 2 * key) for key in range(24)]
    with running(model_of("llama"), kv_cache_gib=0.5) as engine:
        responses = engine.generate(asked)  # 24 rows at first, then 16 and fewer
    exact = model_of("llama").float()
    for each, response in zip(asked, responses, strict=True):
        assert len(response.output_tokens) == each.sampling.max_new_tokens
        expected = full_pass(exact, response, each.sampling)
        assert (torch.tensor(response.output_logprobs) - torch.tensor(expected)).abs().max() < 0.5


def test_deterministic_mode_and_float32_keep_their_own_path(skinny):
    for settings, dtype in (({"deterministic": True}, torch.bfloat16), ({}, torch.float32)):
        with running(model_of("llama", dtype), kv_cache_gib=0.5, **settings) as engine:
            assert engine._runner._skinny is None
            engine.generate(REQUESTS[:2])
