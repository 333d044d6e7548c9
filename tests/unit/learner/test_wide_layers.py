"""Layers with a float32 residual stream."""

from __future__ import annotations

import copy

import pytest
import torch
from engine.engine_parts import make_model
from learner.test_packing import batch

from headwater.learner.packed_module import PolicyModule
from headwater.learner.packing import pack_rows, read_rows
from headwater.learner.wide_layers import widen_layers
from headwater.models import precision
from headwater.models.precision import has_wide_logits, is_wide, wide_linear

KINDS = ("llama", "mistral", "qwen2", "qwen3")


def result(model) -> list[torch.Tensor]:
    """Log-probs and the gradients of all weights."""
    data = batch(num_groups=2)
    [pack] = pack_rows(read_rows(data), data.batch["response_mask"].shape[1], 10_000)
    logprobs = PolicyModule(model, 1.0)(pack)["logprobs"]
    logprobs.sum().backward()
    return [logprobs.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


@pytest.fixture
def float32_is_narrow(monkeypatch):
    """Widen layers that compute in float32, which must not change anything."""
    monkeypatch.setattr(precision, "NARROW_TYPES", (torch.float32,))


@pytest.mark.usefixtures("float32_is_narrow")
def test_in_float32_wide_layers_have_the_bits_of_the_others():
    for kind in KINDS:
        plain = make_model(kind)
        wide = copy.deepcopy(plain)
        assert widen_layers(wide, torch.float32, uses_kernels=False)
        for ours, expected in zip(result(wide), result(plain), strict=True):
            assert torch.equal(ours, expected), kind


@pytest.mark.usefixtures("float32_is_narrow")
def test_the_fused_forward_pass_computes_what_the_layers_do():
    pytest.importorskip("triton", exc_type=ImportError)
    plain = make_model("llama")
    expected = result(copy.deepcopy(plain))
    found = []
    for defers in (False, True):
        fused = copy.deepcopy(plain)
        assert widen_layers(fused, torch.float32, uses_kernels=True, defers=defers)
        outputs = []
        fused.model.layers[0].register_forward_hook(lambda *call, kept=outputs: kept.append(call[2]))
        found.append(result(fused))
        assert isinstance(outputs[0], tuple) == defers
        for ours, theirs in zip(found[-1], expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5 * float(theirs.abs().max()), rtol=1e-4)
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs), "an addition in another kernel has the same bits"


def test_the_residual_stream_stays_float32_and_products_narrow():
    model = make_model("llama").to(torch.float16)
    assert widen_layers(model, torch.float16, uses_kernels=False)
    seen: dict[str, set[torch.dtype]] = {"streams": set(), "inputs": set(), "tables": set()}
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, inputs, output: seen["streams"].add(output.dtype))
        for each in (layer.self_attn.q_proj, layer.mlp.gate_proj):
            each.register_forward_hook(
                lambda module, inputs, output: seen["inputs"].update((inputs[0].dtype, output.dtype))
            )
    model.model.rotary_emb.register_forward_hook(lambda module, inputs, output: seen["tables"].add(output[0].dtype))
    model.model.norm.register_forward_hook(lambda module, inputs, output: seen["inputs"].add(output.dtype))
    assert all(each.isfinite().all() for each in result(model))
    assert seen == {"streams": {torch.float32}, "inputs": {torch.float16}, "tables": {torch.float32}}


def test_only_named_parts_of_known_models_are_widened(monkeypatch):
    llama, gemma = make_model("llama").config, make_model("gemma").config
    assert is_wide("residual", llama, torch.bfloat16)
    assert not is_wide("residual", llama, torch.float32)
    assert not is_wide("residual", gemma, torch.float16)
    assert has_wide_logits(torch.float16)
    assert not has_wide_logits(torch.float32)
    monkeypatch.setattr(precision, "WIDE", {"logits"})
    assert not is_wide("rotary", llama, torch.bfloat16)
    model = make_model("llama")
    assert not widen_layers(model, torch.bfloat16, uses_kernels=False)


def test_a_wide_product_is_not_rounded():
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator).half() for shape in ((3, 8), (5, 8)))
    bias = torch.randn(5, generator=generator).half()
    expected = x.double() @ weight.double().T + bias.double()
    ours = wide_linear(x, weight, bias)
    assert ours.dtype == torch.float32
    assert (ours - expected).abs().max() < 1e-5
    assert ((x @ weight.T + bias) - expected).abs().max() > 1e-4
