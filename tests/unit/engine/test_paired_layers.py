"""Products in pairs inside an engine, in Triton's interpreter, against a full pass of transformers."""

from __future__ import annotations

from dataclasses import replace
from types import NoneType, SimpleNamespace

import pytest
import torch
from engine.engine_parts import full_pass, make_model, reference, request, running, tokens_of
from engine.kernels.support import ON_CUDA

from headwater.engine.adapters import AdapterParts
from headwater.engine.kernels import linear
from headwater.engine.kernels.pair_linear import PairConfig
from headwater.engine.runners import paired
from headwater.engine.runners.cuda import CudaRunner
from headwater.engine.runners.decoder import Projection
from headwater.engine.runners.paired import GATE_UP, QKV, InvariantPairs, MeasuredPairs, PairChoice

pytestmark = pytest.mark.skipif(ON_CUDA, reason="tests/gpu has the same tests for a GPU")
TILES = PairConfig(16, 4, 16, 4, 2)


class AsOnCuda:
    """A cache of the CPU, which keeps the heads of a token together, in the layout of CUDA's."""

    def __init__(self, cache):
        self.spec, self._cache = cache.spec, cache

    def layer(self, index):
        return tuple(each.transpose(1, 2) for each in self._cache.layer(index))


class Counted(MeasuredPairs):
    """Counts the products that it computed."""

    gated_calls = rotated_calls = 0

    def gated(self, x, projection):
        made = super().gated(x, projection)
        self.gated_calls += made is not None
        return made

    def rotated(self, x, layer, rotary, slots, cache, index):
        made = super().rotated(x, layer, rotary, slots, AsOnCuda(cache), index)
        self.rotated_calls += made is not None
        return made


def choices_for(decoder, most_rows: int) -> list[PairChoice]:
    layer = decoder._layers[0]
    pairs = (GATE_UP, layer.gate_up.weight), (QKV, layer.qkv.weight)
    return [PairChoice(name, *weight.shape, most_rows, TILES) for name, weight in pairs]


def test_tokens_and_logprobs_are_those_of_a_full_forward_pass(monkeypatch):
    # The CPU's engine is in float32, which is not one of the types that a GPU uses these kernels for.
    monkeypatch.setattr(paired, "_is_plain", lambda x, projection: projection.adapters is None)
    monkeypatch.setattr(paired, "FEWEST_ROWS", 1)
    with running(make_model("llama")) as engine:  # with biases
        decoder = engine._runner._fused
        decoder.pairs = pairs = Counted(choices_for(decoder, most_rows=2))
        asked = [request(tokens_of(length), key, max_new_tokens=2) for key, length in enumerate((2, 9))]
        responses = engine.generate(asked)
        for each, response in zip(asked, responses, strict=True):
            expected = full_pass(reference("llama"), response, each.sampling)
            assert response.output_logprobs == pytest.approx(expected, abs=1e-4)
        num_layers = len(decoder._layers)
        # In one decode step; the prompts have more rows than the choice.
        assert (pairs.gated_calls, pairs.rotated_calls) == (num_layers, num_layers)


def test_heads_with_norms_are_rotated_on_the_plain_path(monkeypatch):
    monkeypatch.setattr(paired, "_is_plain", lambda x, projection: True)
    for kind, is_plain in (("qwen3", True), ("qwen2", False)):
        with running(make_model(kind)) as engine:
            decoder, cache = engine._runner._fused, AsOnCuda(engine._runner.cache)
            rotary = decoder._rotary(torch.arange(40), None)
            pairs, x = MeasuredPairs(choices_for(decoder, most_rows=64)), torch.zeros(40, 32)
            slots = torch.arange(40) % cache.spec.max_positions
            made = pairs.rotated(x, decoder._layers[0], rotary, slots, cache, 0)
        assert (made is None) == is_plain


def test_the_choice_for_the_fewest_rows_that_are_enough():
    weight = torch.zeros(64, 16, dtype=torch.bfloat16)
    small, large = TILES, replace(TILES, block_m=64)
    pairs = MeasuredPairs(
        [
            PairChoice(GATE_UP, 64, 16, 1024, large),
            PairChoice(GATE_UP, 64, 16, 64, small),
            PairChoice(GATE_UP, 64, 16, 256, None),
        ]
    )

    def chosen(rows, weight=weight, adapters=None, dtype=torch.bfloat16, product=GATE_UP):
        return pairs._config(product, torch.zeros(rows, 16, dtype=dtype), Projection(weight, None, adapters))

    assert [chosen(rows) for rows in (33, 64, 65, 256, 257, 1024)] == [small, small, None, None, large, large]
    assert chosen(1025) is None
    assert chosen(32) is None
    assert chosen(64, product=QKV) is None
    assert chosen(64, weight=weight[:32]) is None, "another shape"
    assert chosen(64, adapters=object.__new__(AdapterParts)) is None
    assert chosen(64, weight=weight.float(), dtype=torch.float32) is None
    assert InvariantPairs().gated(torch.zeros(4, 16), Projection(weight.float(), None)) is None


def test_deterministic_mode_has_no_choices_and_other_gpus_have_none(monkeypatch):
    """Choices are made by timings. Their tiles may be too large for a GPU on which they were not measured."""
    monkeypatch.setattr(paired, "PAIR_CHOICES", (PairChoice(GATE_UP, 64, 16, 64, TILES),))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, device.index))
    devices = [torch.device("cuda", index) for index in (0, 1)]

    def used(*, deterministic: bool) -> list[object]:
        runners = (SimpleNamespace(_deterministic=deterministic, spec=SimpleNamespace(device=each)) for each in devices)
        return [type(CudaRunner._pairs(each)) for each in runners]

    assert used(deterministic=False) == [MeasuredPairs, NoneType]
    assert used(deterministic=True) == [NoneType, NoneType]
    monkeypatch.setattr(linear, "SCALED_TILES", True)
    assert used(deterministic=True) == [InvariantPairs, NoneType]
    assert used(deterministic=False) == [MeasuredPairs, NoneType]
    monkeypatch.setattr(paired, "PAIR_CHOICES", ())
    assert used(deterministic=False) == [NoneType, NoneType]


def test_choices_survive_a_record():
    for config in (TILES, None):
        choice = PairChoice(QKV, 64, 16, 256, config)
        assert PairChoice.of(choice.record()) == choice
