"""Products in pairs on a GPU, and deterministic mode with tiles that depend on the number of rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine.engine_parts import bits, build, full_pass, request, running, tokens_of
from torch.nn import functional as F
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from headwater.engine.attention import cuda as cuda_attention
from headwater.engine.kernels import linear, prefill_attention
from headwater.engine.kernels.activation import silu_and_mul
from headwater.engine.kernels.linear import MatmulConfig, invariant_linear, invariant_parts
from headwater.engine.kernels.norm import sum_add_rms_norm
from headwater.engine.kernels.pair_linear import PairConfig, gated_linear, rotated_linear
from headwater.engine.kernels.rope import rope_and_store
from headwater.engine.runners import paired
from headwater.engine.runners.decoder import Projection
from headwater.engine.runners.paired import GATE_UP, QKV, InvariantPairs, PairChoice

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
QKV_OUTPUTS = {"llama": 960, "qwen2": 2048, "qwen3": 960}
TILES = [
    MatmulConfig(*each)
    for each in (
        (64, 64, 64, 4, 5), (64, 128, 64, 4, 4), (64, 128, 64, 4, 5), (128, 128, 64, 4, 3), (128, 128, 64, 8, 4),
        (128, 256, 64, 8, 3),
    )
]  # fmt: skip
RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_decode_products.json"
MEASURED = tuple(PairChoice.of(each) for each in json.loads(RECORD.read_text())["choices"])
"""The choices that the benchmark made on an H200: those that ``PAIR_CHOICES`` would get."""


@pytest.fixture
def scaled(monkeypatch):
    """Deterministic mode with ``SCALED_TILES`` on, on whatever GPU this is."""
    monkeypatch.setattr(linear, "SCALED_TILES", True)
    monkeypatch.setattr(linear, "_COMPARED_ON", torch.cuda.get_device_capability())


def use_choices(choices: tuple[PairChoice, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired, "PAIR_CHOICES", choices)
    monkeypatch.setattr(paired, "_MEASURED_ON", torch.cuda.get_device_capability())


def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").mul_(scale).bfloat16()


def model_of(kind: str):
    return build(CONFIGS[kind]()).to(torch.bfloat16).to("cuda")


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert ((actual - expected).float().abs().max() / expected.float().abs().max()).item() < 0.02


@pytest.mark.parametrize("rows", [33, 64, 200, 1024])
def test_kernels_agree_with_the_plain_path(rows):
    torch.manual_seed(0)
    for heads, kv_heads, head_dim, hidden, size, has_bias in (
        (12, 2, 128, 1536, 8960, True),
        (9, 3, 64, 576, 1536, False),
    ):
        x, weight = randn(rows, hidden), randn(2 * size, hidden, scale=0.03)
        bias = randn(2 * size) if has_bias else None
        expected = silu_and_mul(F.linear(x, weight, bias))
        for config in TILES:
            close(gated_linear(x, weight, bias, PairConfig.of(config)), expected)
        weight = randn((heads + 2 * kv_heads) * head_dim, hidden, scale=0.03)
        bias = randn(len(weight)) if has_bias else None
        angles = torch.rand(1024, head_dim // 2, device="cuda") * 6.3
        at = torch.arange(rows, device="cuda")
        places = at * 7 % 1024, 64 + at * 3
        plain_caches, caches = (
            [torch.zeros(3 + rows // 16, kv_heads, 64, head_dim, device="cuda").bfloat16() for _ in range(2)]
            for _ in range(2)
        )
        product = F.linear(x, weight, bias)
        expected = rope_and_store(product, angles.cos(), angles.sin(), *places, *plain_caches, heads)
        for config in (PairConfig(64, 32, 64, 4, 5), PairConfig(64, 16, 128, 4, 4), PairConfig(128, 32, 64, 4, 4)):
            tables = angles.cos(), angles.sin()
            close(rotated_linear(x, weight, bias, tables, *places, tuple(caches), heads, config), expected)
            for ours, plain in zip(caches, plain_caches, strict=True):
                close(ours, plain)
                assert torch.equal(ours == 0, plain == 0), "other slots were touched"
                ours.zero_()


def test_an_invariant_result_has_the_same_bits_in_every_tile_size():
    torch.manual_seed(0)
    x, weight = randn(1000, 1536), randn(2048, 1536, scale=0.03)
    expected = invariant_linear(x, weight, None, torch.float32, TILES[0])
    gated = gated_linear(x, weight, None, PairConfig.of(TILES[0]))
    for config in TILES[1:]:
        assert torch.equal(invariant_linear(x, weight, None, torch.float32, config), expected), config
        assert torch.equal(invariant_linear(x[:65], weight, None, torch.float32, config), expected[:65]), config
        assert torch.equal(gated_linear(x[:65], weight, None, PairConfig.of(config)), gated[:65]), config


@pytest.mark.parametrize("outputs", [960, 2048, 17920, 100_003])
def test_scaled_tiles_give_the_bits_of_the_fixed_ones_with_any_number_of_rows(outputs, scaled):
    """With the tiles that an engine chooses for each number of rows."""
    torch.manual_seed(0)
    x, weight, chosen = randn(2048, 1536), randn(outputs, 1536, scale=0.03), set()
    expected = invariant_linear(x, weight, None, torch.float32, TILES[0])
    has_pairs = outputs % 2 == 0
    gated = gated_linear(x, weight, None, PairConfig.of(TILES[0])) if has_pairs else None
    for rows in (1, 8, 33, 64, 65, 129, 256, 700, 1024, 2048):
        chosen.add(linear.invariant_config(x[:rows], outputs))
        assert torch.equal(invariant_linear(x[:rows], weight, None, torch.float32), expected[:rows]), rows
        if has_pairs:
            assert torch.equal(InvariantPairs().gated(x[:rows], Projection(weight, None)), gated[:rows]), rows
    assert chosen - {TILES[0]}, "other tiles than the fixed ones"


def test_an_invariant_sum_in_slices_has_the_same_bits_with_any_number_of_rows(scaled):
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


@pytest.mark.parametrize(
    "choice",
    [each for each in MEASURED if each.config is not None],
    ids=lambda each: f"{each.product}-{each.outputs}-{each.most_rows}",
)
def test_measured_choices_compute_a_row_alike_with_any_number_of_rows(choice):
    torch.manual_seed(0)
    heads, kv_heads, head_dim = (12, 2, 128) if choice.inputs == 1536 else (9, 3, 64)
    x, weight = randn(choice.most_rows, choice.inputs), randn(choice.outputs, choice.inputs, scale=0.03)
    angles = torch.rand(64, head_dim // 2, device="cuda") * 6.3
    tables, at = (angles.cos(), angles.sin()), torch.arange(choice.most_rows, device="cuda")

    def computed(rows: int, *, with_kernel: bool) -> list[torch.Tensor]:
        """All results of the first rows."""
        if choice.product == GATE_UP:
            if with_kernel:
                return [gated_linear(x[:rows], weight, None, choice.config)]
            return [silu_and_mul(F.linear(x[:rows], weight))]
        caches = [torch.zeros(1 + choice.most_rows // 64, kv_heads, 64, head_dim, device="cuda") for _ in range(2)]
        caches = [each.bfloat16() for each in caches]
        places = at[:rows] % 64, at[:rows]
        if with_kernel:
            query = rotated_linear(x[:rows], weight, None, tables, *places, tuple(caches), heads, choice.config)
        else:
            query = rope_and_store(F.linear(x[:rows], weight), *tables, *places, *caches, heads)
        return [query, *(each.transpose(1, 2).flatten(0, 1)[:rows] for each in caches)]

    whole = computed(choice.most_rows, with_kernel=True)
    for ours, plain in zip(whole, computed(choice.most_rows, with_kernel=False), strict=True):
        close(ours, plain)
    for rows in (33, choice.most_rows // 2 + 1, choice.most_rows):
        for fewer, all_rows in zip(computed(rows, with_kernel=True), whole, strict=True):
            assert torch.equal(fewer, all_rows[:rows]), rows


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_engine_with_chosen_pairs_is_as_near_to_exact_log_probs(kind, monkeypatch):
    hidden = 1536 if kind == "qwen2" else 576
    size = 8960 if kind == "qwen2" else 1536
    choices = (
        PairChoice(GATE_UP, 2 * size, hidden, 256, PairConfig(64, 64, 64, 4, 4)),
        PairChoice(QKV, QKV_OUTPUTS[kind], hidden, 256, PairConfig(64, 32, 64, 4, 5)),
    )
    requests = [request(tokens_of(9 + key % 40), key, max_new_tokens=16) for key in range(64)]
    exact = model_of(kind).float()
    gaps = []
    for used in ((), choices, MEASURED):
        use_choices(used, monkeypatch)
        with running(model_of(kind), kv_cache_gib=0.5) as engine:
            assert (engine._runner._fused.pairs is not None) == bool(used)
            responses = engine.generate(requests)
        pairs = [
            abs(ours - expected)
            for response, asked in zip(responses, requests, strict=True)
            for ours, expected in zip(response.output_logprobs, full_pass(exact, response, asked.sampling), strict=True)
        ]
        gaps.append(torch.tensor(pairs))
    for with_pairs in gaps[1:]:
        assert with_pairs.mean() < 1.3 * gaps[0].mean()
        assert with_pairs.max() < 0.5


def test_choices_change_nothing_in_deterministic_mode(monkeypatch):
    requests = [request(tokens_of(9 + 3 * key), key, max_new_tokens=16) for key in range(48)]
    seen = []
    for choices in ((), MEASURED):
        use_choices(choices, monkeypatch)
        with running(model_of("qwen2"), kv_cache_gib=0.5, deterministic=True) as engine:
            assert not isinstance(engine._runner._fused.pairs, paired.MeasuredPairs)
            seen.append(bits(engine.generate(requests)))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("keys", [64, 32])
@pytest.mark.parametrize("kind", CONFIGS)
def test_deterministic_mode_with_scaled_tiles_does_not_depend_on_the_batch(kind, keys, scaled, monkeypatch):
    monkeypatch.setattr(prefill_attention, "KEYS_PER_BLOCK", keys)
    requests = [request(tokens_of(9 + 31 * key), key, max_new_tokens=24) for key in range(40)]
    with running(model_of(kind), kv_cache_gib=0.5, deterministic=True) as engine:
        assert isinstance(engine._runner._fused.pairs, InvariantPairs)
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
def test_deterministic_mode_with_scaled_tiles_and_many_rows(dtype, scaled):
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


def test_dependent_attention_gives_the_same_responses(monkeypatch):
    requests = [request(tokens_of(9 + 5 * key), key, max_new_tokens=48) for key in range(40)]
    seen = []
    for dependent in (False, True):
        monkeypatch.setattr(cuda_attention, "DEPENDENT_LAUNCH", dependent)
        with running(model_of("qwen2"), kv_cache_gib=0.5) as engine:
            runs = [engine.generate(requests) for _ in range(2)]
        seen += [[(each.output_tokens, each.output_logprobs) for each in responses] for responses in runs]
    assert all(each == seen[0] for each in seen[1:])
