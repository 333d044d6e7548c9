"""Deterministic mode on a GPU: a row has the same bits in every tile size and in every batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine.engine_parts import bits, build, request, running, tokens_of
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from headwater.engine.kernels import linear
from headwater.engine.kernels.gated_linear import gated_linear
from headwater.engine.kernels.linear import MatmulConfig, invariant_linear, invariant_parts
from headwater.engine.kernels.norm import sum_add_rms_norm
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
    "qwen2": lambda: Qwen2Config(**{**QWEN2, "intermediate_size": 8960}, use_sliding_window=False),
    "qwen3": lambda: Qwen3Config(**SMOLLM2),
}
TILES = [
    MatmulConfig(*each)
    for each in (
        (64, 64, 64, 4, 5), (64, 128, 64, 4, 4), (64, 128, 64, 4, 5), (128, 128, 64, 4, 3), (128, 128, 64, 8, 4),
        (128, 256, 64, 8, 3),
    )
]  # fmt: skip
needs_scaled_tiles = pytest.mark.skipif(
    not (torch.cuda.is_available() and linear.has_scaled_tiles(torch.device("cuda", 0))),
    reason=f"tiles depend on the rows only on GPUs of compute capability {linear.SCALED_TILES_ON}",
)


@pytest.fixture(params=["own tiles", "fixed tiles"])
def tiles(request, monkeypatch):
    """The tiles of this GPU, and those of GPUs on which they do not depend on the number of rows."""
    if request.param == "fixed tiles":
        monkeypatch.setattr(linear, "SCALED_TILES_ON", None)


def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").mul_(scale).bfloat16()


def model_of(kind: str):
    return build(CONFIGS[kind]()).to(torch.bfloat16).to("cuda")


@needs_scaled_tiles
def test_an_invariant_result_has_the_same_bits_in_every_tile_size():
    torch.manual_seed(0)
    x, weight = randn(1000, 1536), randn(2048, 1536, scale=0.03)
    expected = invariant_linear(x, weight, None, torch.float32, TILES[0])
    gated = gated_linear(x, weight, None, TILES[0])
    for config in TILES[1:]:
        assert torch.equal(invariant_linear(x, weight, None, torch.float32, config), expected), config
        assert torch.equal(invariant_linear(x[:65], weight, None, torch.float32, config), expected[:65]), config
        assert torch.equal(gated_linear(x[:65], weight, None, config), gated[:65]), config


@needs_scaled_tiles
@pytest.mark.parametrize("outputs", [960, 2048, 17920, 100_003])
def test_scaled_tiles_give_the_bits_of_the_fixed_ones_with_any_number_of_rows(outputs):
    """With the tiles that an engine chooses for each number of rows."""
    torch.manual_seed(0)
    x, weight, chosen = randn(2048, 1536), randn(outputs, 1536, scale=0.03), set()
    expected = invariant_linear(x, weight, None, torch.float32, TILES[0])
    has_pairs = outputs % 2 == 0
    gated = gated_linear(x, weight, None, TILES[0]) if has_pairs else None
    for rows in (1, 8, 33, 64, 65, 129, 256, 700, 1024, 2048):
        chosen.add(linear.invariant_config(x[:rows], outputs))
        assert torch.equal(invariant_linear(x[:rows], weight, None, torch.float32), expected[:rows]), rows
        if has_pairs:
            assert torch.equal(gated_linear(x[:rows], weight), gated[:rows]), rows
    assert chosen - {TILES[0]}, "other tiles than the fixed ones"


@needs_scaled_tiles
def test_an_invariant_sum_in_slices_has_the_same_bits_with_any_number_of_rows():
    torch.manual_seed(0)
    x, weight, norm_weight = randn(4096, 8960), randn(1536, 8960, scale=0.03), randn(1536)

    def normed(rows: int) -> tuple[int, torch.Tensor]:
        parts = invariant_parts(x[:rows], weight)
        return len(parts), sum_add_rms_norm(parts, None, torch.zeros(rows, 1536, device="cuda"), norm_weight, 1e-6)

    num_parts, whole = normed(4096)
    assert num_parts == 1
    for rows in (1, 8, 64, 65, 256, 700, 1024):
        num_parts, fewer = normed(rows)
        assert torch.equal(fewer, whole[:rows]), rows
        assert num_parts == 4 or rows > 256


@pytest.mark.parametrize("kind", CONFIGS)
def test_responses_do_not_depend_on_the_batch(kind, tiles):
    requests = [request(tokens_of(9 + 31 * key), key, max_new_tokens=24) for key in range(40)]
    with running(model_of(kind), kv_cache_gib=0.5, deterministic=True) as engine:
        together = engine.generate(requests)
        for key in (0, 7, 39):
            (alone,) = engine.generate([requests[key]])
            assert alone.output_tokens == together[key].output_tokens
            assert alone.output_logprobs == together[key].output_logprobs
        # The rest of a response after its first half, which is now computed as a part of the prompt.
        whole = together[3]
        half = len(whole.output_tokens) // 2
        (rest,) = engine.generate([replace(requests[3], given_tokens=whole.output_tokens[:half])])
        assert rest.output_tokens == whole.output_tokens[half:]
        assert rest.output_logprobs == whole.output_logprobs[half:]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_responses_do_not_depend_on_the_batch_with_many_rows(dtype, tiles):
    """Batches of decode steps for which every tile size is used, also by the output layer."""

    def model():
        shape = {**QWEN2, "intermediate_size": 8960, "num_hidden_layers": 2, "vocab_size": 32_768}
        return build(Qwen2Config(**shape, use_sliding_window=False)).to(dtype).to("cuda")

    requests = [request(tokens_of(5 + key % 30), key, max_new_tokens=12) for key in range(320)]
    with running(model(), kv_cache_gib=0.5, max_sequences=320, deterministic=True) as engine:
        together = bits(engine.generate(requests))
        for start, stop in ((0, 1), (7, 10), (40, 73), (100, 229), (0, 320)):
            assert bits(engine.generate(requests[start:stop])) == together[start:stop], (start, stop)
    with running(model(), kv_cache_gib=0.5, deterministic=True, prefix_cache=False, overlap=False) as engine:
        assert bits(engine.generate(requests[:64])) == together[:64]


def test_the_fast_mode_has_no_use_for_these_products(monkeypatch):
    def refused(*_, **__):
        raise AssertionError("a product of deterministic mode")

    monkeypatch.setattr(linear, "_launch", refused)
    monkeypatch.setattr(cuda_runner, "gated_linear", refused)
    with running(model_of("qwen2"), kv_cache_gib=0.5) as engine:
        assert len(engine.generate([request(tokens_of(9 + key), key, max_new_tokens=4) for key in range(3)])) == 3
