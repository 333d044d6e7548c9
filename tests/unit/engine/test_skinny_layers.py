"""The layers for few rows inside an engine, in Triton's interpreter, against a full pass of transformers."""

from __future__ import annotations

import pytest
import torch
from cases import case
from engine.engine_parts import full_pass, make_model, reference, request, running, tokens_of
from engine.kernels.support import ON_CUDA

from headwater.engine.kernels.skinny_pairs import MAX_ROWS
from headwater.engine.runners.skinny import SkinnyLayers

pytestmark = pytest.mark.skipif(ON_CUDA, reason="tests/gpu has the same tests for a GPU")


class AsOnCuda:
    """A cache of the CPU, which keeps the heads of a token together, in the layout of CUDA's."""

    def __init__(self, cache):
        self.spec, self.store, self._cache = cache.spec, cache.store, cache

    def layer(self, index):
        return tuple(each.transpose(1, 2) for each in self._cache.layer(index))


class Counted(SkinnyLayers):
    """Counts the rows of its passes."""

    passes: tuple[int, ...] = ()

    def __call__(self, layers, final_norm, residual, rotary, slots, attention, cache):
        self.passes += (len(residual),)
        return super().__call__(layers, final_norm, residual, rotary, slots, attention, AsOnCuda(cache))


def test_tokens_and_logprobs_are_those_of_a_full_forward_pass():
    for kind, num_steps in (("llama", 2), ("qwen3", 1)):  # with biases, with head norms
        with case(kind), running(make_model(kind)) as engine:
            asked = [
                request(tokens_of(length), key, max_new_tokens=num_steps + 1) for key, length in enumerate((2, 5, 40))
            ]
            few_rows = Counted(engine._runner._ops, 4, torch.device("cpu"))
            engine._runner._fused.few_rows = few_rows
            responses = engine.generate(asked)
            for each, response in zip(asked, responses, strict=True):
                expected = full_pass(reference(kind), response, each.sampling)
                assert response.output_logprobs == pytest.approx(expected, abs=1e-4)
            assert few_rows.passes == (3,) * num_steps, "prompts are longer than the limit, the decode steps are not"


def test_what_the_layers_do_not_handle_takes_the_plain_path():
    with running(make_model("qwen2")) as engine:
        layers, few_rows = engine._runner._fused._layers, SkinnyLayers(engine._runner._ops, 4, torch.device("cpu"))
    assert few_rows.fits(layers, torch.zeros(4, 32))
    assert not few_rows.fits(layers, torch.zeros(5, 32))
    assert not few_rows.fits(layers, torch.zeros(4, 32, dtype=torch.bfloat16)), "a narrow residual stream"
    assert few_rows.counters(4) is not None
    assert few_rows.counters(5) is None
    with pytest.raises(AssertionError, match="at most 32"):
        SkinnyLayers(engine._runner._ops, MAX_ROWS + 1, torch.device("cpu"))
